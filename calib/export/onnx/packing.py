"""Codes packed in int16 words and numbers in bytes, plane by plane: the counterpart of `kernels/pack`. All tensors have four axes,
codes in the last."""

import numpy as np

from calib.export.onnx.graph import Value
from calib.kernels.pack.reference import Widths, byte_parts, first_bits, pattern, words_per_token


def pack(codes: Value, bits: int | Widths, channels: int) -> Value:
    """Returns codes int32 `[..., channels]` packed in words int16 `[..., W]`."""
    return as_int16(_merged(codes, pattern(bits), channels, words_per_token(channels, bits)))


def unpack(words: Value, bits: int | Widths, channels: int) -> Value:
    """Returns the codes int32 `[..., channels]` in words int16 `[..., W]`."""
    return _fields(unsigned(words), pattern(bits), words_per_token(channels, bits), channels)


def pack_bytes(numbers: Value, width: int, count: int) -> Value:
    """Returns numbers int32 `[..., count]` below 2**width packed in bytes uint8 `[..., B]`."""
    packed = []
    for bits, first in byte_parts(width):
        part = numbers / (1 << first) & ((1 << bits) - 1)
        packed.append(_merged(part, (bits,) * (8 // bits), count, -(-count * bits // 8)))
    return numbers.graph.join(packed, 3).cast(np.uint8)


def unpack_bytes(packed: Value, width: int, count: int) -> Value:
    """Returns the numbers int32 `[..., count]` in bytes uint8 `[..., B]`."""
    parts = byte_parts(width)
    runs = [-(-count * bits // 8) for bits, _ in parts]
    found = [
        _fields(run, (bits,) * (8 // bits), size, count) * (1 << first)
        for run, size, (bits, first) in zip(packed.cast(np.int32).split(3, runs), runs, parts, strict=True)
    ]
    return sum(found[1:], found[0])


def as_int16(word: Value) -> Value:
    """Returns int32 in [0, 2**16) as the int16 of the same bits."""
    return (word - (word & 0x8000) * 2).cast(np.int16)


def unsigned(word: Value) -> Value:
    """Returns int16 as the int32 in [0, 2**16) of the same bits."""
    return word.cast(np.int32) & 0xFFFF


def _merged(codes: Value, widths: Widths, count: int, words: int) -> Value:
    """Returns `count` codes packed in `words` words, int32; a word is the sum of one shifted code of each plane."""
    fields = len(widths)
    missing = fields * words - count
    whole = codes.pad(3, 4, missing) if missing else codes
    return (whole.reshape(0, 0, 0, fields, words) * _powers(widths)).sum(3, keep=False)


def _fields(words: Value, widths: Widths, width: int, count: int) -> Value:
    """Returns the `count` codes that `_merged` packed in `width` words."""
    masks = np.array([[(1 << bits) - 1] for bits in widths], np.int32)
    codes = words.reshape(0, 0, 0, 1, width) / words.graph.constant(_powers(widths)) & masks
    codes = codes.reshape(0, 0, 0, len(widths) * width)
    return codes.part(3, 0, count) if len(widths) * width > count else codes


def _powers(widths: Widths) -> np.ndarray:
    """Returns the power of two that shifts each plane to its bits, int32 `[fields, 1]`."""
    return np.array([[1 << first] for first in first_bits(widths)], np.int32)
