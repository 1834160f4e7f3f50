"""Codes in int16 words and numbers in bytes, plane-split: the twin of `kernels/pack`. Tensors have four axes, codes last."""

import numpy as np

from calib.export.onnx.graph import Value
from calib.kernels.pack.reference import Widths, byte_parts, first_bits, pattern, words_per_token


def pack(codes: Value, bits: int | Widths, channels: int) -> Value:
    """Codes int32 `[..., channels]` -> words int16 `[..., W]`."""
    return as_int16(_merged(codes, pattern(bits), channels, words_per_token(channels, bits)))


def unpack(words: Value, bits: int | Widths, channels: int) -> Value:
    """Words int16 `[..., W]` -> codes int32 `[..., channels]`."""
    return _fields(unsigned(words), pattern(bits), words_per_token(channels, bits), channels)


def pack_bytes(numbers: Value, width: int, count: int) -> Value:
    """Numbers int32 `[..., count]` below 2**width -> bytes uint8 `[..., B]`."""
    packed = []
    for bits, first in byte_parts(width):
        part = numbers / (1 << first) & ((1 << bits) - 1)
        packed.append(_merged(part, (bits,) * (8 // bits), count, -(-count * bits // 8)))
    return numbers.graph.join(packed, 3).cast(np.uint8)


def unpack_bytes(packed: Value, width: int, count: int) -> Value:
    """Bytes uint8 `[..., B]` -> numbers int32 `[..., count]`."""
    parts = byte_parts(width)
    runs = [-(-count * bits // 8) for bits, _ in parts]
    found = [
        _fields(run, (bits,) * (8 // bits), size, count) * (1 << first)
        for run, size, (bits, first) in zip(packed.cast(np.int32).split(3, runs), runs, parts, strict=True)
    ]
    return sum(found[1:], found[0])


def as_int16(word: Value) -> Value:
    """int32 in [0, 2**16) -> the int16 of the same bits."""
    return (word - (word & 0x8000) * 2).cast(np.int16)


def unsigned(word: Value) -> Value:
    """int16 -> int32 in [0, 2**16), the same bits."""
    return word.cast(np.int32) & 0xFFFF


def _merged(codes: Value, widths: Widths, count: int, words: int) -> Value:
    """`count` codes as so many `words`, sums of one field of each plane, int32."""
    fields = len(widths)
    missing = fields * words - count
    whole = codes.pad(3, 4, missing) if missing else codes
    return (whole.reshape(0, 0, 0, fields, words) * _powers(widths)).sum(3, keep=False)


def _fields(words: Value, widths: Widths, width: int, count: int) -> Value:
    """The codes that `_merged` put together in `width` words."""
    masks = np.array([[(1 << bits) - 1] for bits in widths], np.int32)
    codes = words.reshape(0, 0, 0, 1, width) / words.graph.constant(_powers(widths)) & masks
    codes = codes.reshape(0, 0, 0, len(widths) * width)
    return codes.part(3, 0, count) if len(widths) * width > count else codes


def _powers(widths: Widths) -> np.ndarray:
    """What shifts each plane to its position, int32 `[fields, 1]`."""
    return np.array([[1 << first] for first in first_bits(widths)], np.int32)
