"""Tokens that have a size: numbers of four bits as pages hold them, and streams whose tokens are that size times as large."""

from dataclasses import dataclass, replace

import torch
from paged_attention import Pages
from torch import Tensor

from calib.kernels.attend.operation import RopeTables


@dataclass(frozen=True)
class Sizes:
    """Random sizes of three pages of tokens: s float64 `[pages, kv_heads, page_tokens, 1]`, and the words that say so."""

    sizes: Tensor
    words: Tensor


def sizes_of(heads: int, page: int, seed: int, largest: int = 15, in_bytes: bool = False) -> Sizes:
    """s = 2^((i - 5) / 2), i = 0 ... `largest`; of W words a token, of 16 bits or of 8, the h % W-th has head h, in its bits from
    4 (h // W) on."""
    numbers = torch.randint(0, largest + 1, (3, heads, page), generator=torch.Generator().manual_seed(seed))
    width = -(-heads // (2 if in_bytes else 4))
    words = torch.zeros(3, 1, page, width, dtype=torch.int64)
    for head in range(heads):
        words[:, 0, :, head % width] |= numbers[:, head] << (4 * (head // width))
    signed = torch.where(words < 2**15, words, words - 2**16)
    stored = words.to(torch.uint8) if in_bytes else signed.to(torch.int16)
    return Sizes(2.0 ** ((numbers.double() - 5) / 2)[..., None], stored)


def sized(pages: Pages, own: Sizes) -> Pages:
    """Tokens times their sizes."""
    return Pages(replace(pages.stream, sizes=own.words), pages.tokens * own.sizes)


def sized_keys(pages: Pages, rope_tables: RopeTables, own: Sizes) -> Pages:
    """Keys whose distance from their mean is times their sizes."""
    mean = rope_tables.mean.double()
    return Pages(replace(pages.stream, sizes=own.words), mean + (pages.tokens - mean) * own.sizes)
