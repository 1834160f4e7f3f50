"""Plane-split packing of small integer codes into int16 words (layout in README.md of this folder).

A word holds F = 16 // bits codes, one from each of F planes; plane f keeps the channels [f*W, (f+1)*W), W = ceil(D / F).
Word w of a token is therefore sum_f code[f*W + w] << (bits*f): unpacking a plane is one shift and one mask, and it
never interleaves neighbouring channels, which is what an attention kernel pays for elsewhere.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 16


def planes(bits: int) -> int:
    """Number of codes in one int16 word: 16, 8, 5, 4, 3, 2, 2, 2 for 1 ... 8 bits."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 ... 8, got {bits}")
    return WORD_BITS // bits


def words_per_token(channels: int, bits: int) -> int:
    """Words that hold one token's `channels` codes; the last plane is padded where F does not divide them."""
    return -(-channels // planes(bits))


@lru_cache
def _shifts(bits: int, device: torch.device) -> Tensor:
    """First bit of each plane `[F, 1]`; kept, because making it costs as much as using it."""
    return torch.arange(0, bits * planes(bits), bits, dtype=torch.int16, device=device)[:, None]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., D]` (integers below 2**bits, any dtype) -> words `[..., W]` int16."""
    fields, width = planes(bits), words_per_token(codes.shape[-1], bits)
    words, missing = codes.to(torch.int16), fields * width - codes.shape[-1]
    words = F.pad(words, (0, missing)) if missing else words
    while fields > 1:
        # The later half of the planes, shifted, onto the earlier half: long runs, and half as many codes each time. No two
        # planes share a bit, so that sums are unions; the sixteenth bit is a code bit like the others.
        kept = (fields + 1) // 2
        early, late = words[..., : kept * width], words[..., kept * width :]
        late = F.pad(late, (0, width)) if fields % 2 else late
        words, fields = torch.add(early, late, alpha=1 << (bits * kept)), kept
    return words


def unpack(words: Tensor, bits: int, channels: int) -> Tensor:
    """Words `[..., W]` int16 -> codes `[..., D]` uint8."""
    return unpack_columns(words.unsqueeze(-1), bits, channels).squeeze(-1).to(torch.uint8)


def unpack_columns(words: Tensor, bits: int, channels: int) -> Tensor:
    """Words with tokens last, `[..., W, T]` int16 -> codes `[..., D, T]` int16.

    With tokens last every plane is one contiguous run for any bit width, so that this is three vectorised operations.
    """
    shifts = _shifts(bits, words.device).unsqueeze(-1)
    # An arithmetic shift drags the sign along; the mask drops it.
    fields = (words.unsqueeze(-3) >> shifts).bitwise_and_((1 << bits) - 1)
    return fields.flatten(-3, -2)[..., :channels, :]


def byte_parts(width: int) -> list[tuple[int, int]]:
    """Parts (bits, first bit) of a number of `width` bits, 1 ... 16, that fill whole bytes: 13 = 8 + 4 + 1."""
    if not 1 <= width <= 16:
        raise ValueError(f"a number has 1 ... 16 bits, got {width}")
    parts, first = [], 0
    while first < width:
        bits = next(size for size in (8, 4, 2, 1) if size <= width - first)
        parts.append((bits, first))
        first += bits
    return parts


def bytes_per_token(count: int, width: int) -> int:
    """Bytes that hold one token's `count` numbers of `width` bits."""
    return sum(-(-count * bits // 8) for bits, _ in byte_parts(width))


def pack_bytes(numbers: Tensor, width: int) -> Tensor:
    """Numbers `[..., n]` (integers below 2**width) -> bytes `[..., B]` uint8, each part plane-split like a word's codes."""
    count, packed = numbers.shape[-1], []
    for bits, first in byte_parts(width):
        fields, run = 8 // bits, -(-count * bits // 8)
        part = (numbers.to(torch.int32) >> first) & ((1 << bits) - 1)
        part = F.pad(part, (0, fields * run - count)).unflatten(-1, (fields, run))
        packed.append((part << _byte_shifts(bits, numbers.device)).sum(-2).to(torch.uint8))
    return torch.cat(packed, -1)


def unpack_bytes(packed: Tensor, width: int, count: int) -> Tensor:
    """Bytes `[..., B]` uint8 -> numbers `[..., n]` int32."""
    found, at = torch.zeros((), dtype=torch.int32, device=packed.device), 0
    for bits, first in byte_parts(width):
        run = -(-count * bits // 8)
        part = packed[..., None, at : at + run].to(torch.int32) >> _byte_shifts(bits, packed.device)
        found = found + (((part & ((1 << bits) - 1)) << first).flatten(-2)[..., :count])
        at += run
    return found


@lru_cache
def _byte_shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.int32, device=device)[:, None]
