"""Plane-split packing of small integer codes into int16 words (layout in README.md of this folder).

A word has P fields, the first in the lowest bits. The pattern gives their widths: `bits` as often as it fits into 16, or widths
that differ. With W words per token, plane p has the channels [p*W, (p+1)*W), and word w of a token is sum_p code[p*W + w] <<
first_bit[p]. Unpacking a plane is one shift and one mask, and it does not interleave channels, which would be expensive in an
attention kernel. A parameter `bits` may be a number of bits or a pattern.
"""

from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 16

Widths = tuple[int, ...]


@cache
def pattern(bits: int | Widths) -> Widths:
    """Widths in bits of a word's fields, lowest first: one width repeated (16, 8, 5, 4, 3, 2, 2, 2 times for 1 ... 8 bits), or the
    given ones. Raises ValueError unless each is 1 ... 8 and their sum is at most 16."""
    widths = bits if isinstance(bits, tuple) else (bits,)
    if not widths or not all(1 <= width <= 8 for width in widths):
        raise ValueError(f"bits must be 1 ... 8, got {bits}")
    if sum(widths) > WORD_BITS:
        raise ValueError(f"fields of a word have {WORD_BITS} bits together at most, got {bits}")
    return widths if isinstance(bits, tuple) else widths * (WORD_BITS // bits)


def planes(bits: int | Widths) -> int:
    """Number of codes in one int16 word."""
    return len(pattern(bits))


@cache
def words_per_token(channels: int, bits: int | Widths) -> int:
    """Number of words of one token with `channels` codes; the last plane is padded if the planes do not divide them."""
    return -(-channels // planes(bits))


def first_bits(bits: int | Widths) -> list[int]:
    """First bit of each field of a word."""
    return list(accumulate(pattern(bits)[:-1], initial=0))


@cache
def _fields(bits: int | Widths, device: torch.device) -> tuple[Tensor, Tensor]:
    """First bit and mask of each plane, int16 `[P, 1, 1]`; cached, because making the tensors costs as much as using them."""
    numbers = first_bits(bits), [(1 << width) - 1 for width in pattern(bits)]
    first, mask = (
        torch.stack([torch.full((1, 1), number, dtype=torch.int16, device=device) for number in part])
        for part in numbers
    )
    return first, mask


@cache
def _merges(bits: int | Widths) -> list[tuple[int, int, int, int]]:
    """Steps that combine all planes into one: (first, last, distance, factor) adds `factor` times the planes [first + distance,
    last + distance) to the planes [first, last).

    The later half of the planes is added to the earlier half, again and again, in long contiguous runs. Neighbouring planes with
    the same factor form one step; in a pattern of one width that is the whole half.
    """
    at, fields, found = first_bits(bits), planes(bits), []
    while fields > 1:
        kept = (fields + 1) // 2
        moves = [at[kept + plane] - at[plane] for plane in range(fields - kept)]
        first = 0
        for last in range(1, len(moves) + 1):
            if last == len(moves) or moves[last] != moves[first]:
                # The factor 2^15 is -2^15 as an int16 number.
                found.append((first, last, kept, 1 << moves[first] if moves[first] < WORD_BITS - 1 else -(1 << 15)))
                first = last
        fields = kept
    return found


def pack(codes: Tensor, bits: int | Widths) -> Tensor:
    """Packs codes `[..., D]` (integers below 2**width of their field, any dtype) -> words `[..., W]` int16."""
    return pack_away(codes.to(torch.int16, copy=True), bits)


def pack_away(words: Tensor, bits: int | Widths) -> Tensor:
    """`pack` for int16 codes that are no longer needed: they may be overwritten."""
    count, width = planes(bits), words_per_token(words.shape[-1], bits)
    missing = count * width - words.shape[-1]
    words = F.pad(words, (0, missing)) if missing else words
    for first, last, distance, factor in _merges(bits):
        # Planes have no bits in common, so that a sum is a bitwise or.
        run = (last - first) * width
        later = words.narrow(-1, (first + distance) * width, run)
        words.narrow(-1, first * width, run).add_(later, alpha=factor)
    return words.narrow(-1, 0, width).contiguous()


def unpack(words: Tensor, bits: int | Widths, channels: int) -> Tensor:
    """Unpacks words `[..., W]` int16 -> codes `[..., D]` uint8."""
    return unpack_columns(words.unsqueeze(-1), bits, channels).squeeze(-1).to(torch.uint8)


def unpack_columns(words: Tensor, bits: int | Widths, channels: int) -> Tensor:
    """Unpacks words with tokens last, `[..., W, T]` int16 -> codes `[..., D, T]` int16.

    With tokens last every plane is one contiguous run for any pattern, so that this is two vectorised operations.
    """
    first, mask = _fields(bits, words.device)
    # An arithmetic shift extends the sign; the mask removes it.
    codes = (words.unsqueeze(-3) >> first).bitwise_and_(mask).flatten(-3, -2)
    return codes if codes.shape[-2] == channels else codes[..., :channels, :]


def byte_parts(width: int) -> list[tuple[int, int]]:
    """Splits a number of `width` bits, 1 ... 16, into parts (bits, first bit) of 8, 4, 2 or 1 bits: 13 = 8 + 4 + 1. Raises
    ValueError for other widths."""
    if not 1 <= width <= 16:
        raise ValueError(f"a number has 1 ... 16 bits, got {width}")
    parts, first = [], 0
    while first < width:
        bits = next(size for size in (8, 4, 2, 1) if size <= width - first)
        parts.append((bits, first))
        first += bits
    return parts


def bytes_per_token(count: int, width: int) -> int:
    """Bytes of one token's `count` numbers of `width` bits, packed by `pack_bytes`."""
    return sum(-(-count * bits // 8) for bits, _ in byte_parts(width))


def pack_bytes(numbers: Tensor, width: int) -> Tensor:
    """Packs numbers `[..., n]` (integers below 2**width) -> bytes `[..., B]` uint8, each part plane-split like a word's codes."""
    count, packed = numbers.shape[-1], []
    for bits, first in byte_parts(width):
        fields, run = 8 // bits, -(-count * bits // 8)
        part = (numbers.to(torch.int32) >> first) & ((1 << bits) - 1)
        part = F.pad(part, (0, fields * run - count)).unflatten(-1, (fields, run))
        packed.append((part << _byte_shifts(bits, numbers.device)).sum(-2).to(torch.uint8))
    return torch.cat(packed, -1)


def unpack_bytes(packed: Tensor, width: int, count: int) -> Tensor:
    """Unpacks bytes `[..., B]` uint8 -> numbers `[..., n]` int32."""
    found, at = torch.zeros((), dtype=torch.int32, device=packed.device), 0
    for bits, first in byte_parts(width):
        run = -(-count * bits // 8)
        part = packed[..., None, at : at + run].to(torch.int32) >> _byte_shifts(bits, packed.device)
        found = found + (((part & ((1 << bits) - 1)) << first).flatten(-2)[..., :count])
        at += run
    return found


@cache
def _byte_shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.int32, device=device)[:, None]
