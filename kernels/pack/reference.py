"""Plane-split packing of small integer codes into int16 words (layout in README.md of this folder).

A word holds F = 16 // bits codes, one from each of F planes; plane f keeps the channels [f*W, (f+1)*W), W = ceil(D / F).
Word w of a token is therefore sum_f code[f*W + w] << (bits*f): unpacking a plane is one shift and one mask, and it
never interleaves neighbouring channels, which is what an attention kernel pays for elsewhere.
"""

import torch
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


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., D]` (integers below 2**bits, any integer dtype) -> words `[..., W]` int16."""
    channels, width = codes.shape[-1], words_per_token(codes.shape[-1], bits)
    words = torch.zeros(*codes.shape[:-1], width, dtype=torch.int32, device=codes.device)
    for plane, start in enumerate(range(0, channels, width)):
        part = codes[..., start : start + width].to(torch.int32) << (bits * plane)
        words[..., : part.shape[-1]] |= part
    return words.to(torch.int16)  # wraps: the sixteenth bit is a code bit like the others


def unpack(words: Tensor, bits: int, channels: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Words `[..., W]` int16 -> codes `[..., D]` in `dtype` (uint8, or float32 to feed a product directly)."""
    width = words.shape[-1]
    codes = torch.empty(*words.shape[:-1], channels, dtype=dtype, device=words.device)
    mask = (1 << bits) - 1
    for plane, start in enumerate(range(0, channels, width)):
        stop = min(start + width, channels)
        # An arithmetic shift drags the sign along; the mask drops it.
        codes[..., start:stop] = (words[..., : stop - start] >> (bits * plane)) & mask
    return codes
