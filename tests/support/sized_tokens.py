"""Token sizes: packed numbers of four bits, and streams whose decoded tokens are multiplied by their sizes."""

from dataclasses import dataclass, replace

import torch
from paged_attention import Pages
from torch import Tensor

from calib.kernels.attend.operation import RopeTables


@dataclass(frozen=True)
class Sizes:
    """Random sizes of three pages of tokens, float64 `[pages, kv_heads, page_tokens, 1]`, and the same as packed words."""

    sizes: Tensor
    words: Tensor


def sizes_of(heads: int, page: int, seed: int, largest: int = 15, in_bytes: bool = False) -> Sizes:
    """Draw sizes s = 2^((i - 5) / 2), i = 0 ... `largest`. A token has W words of 16 bits, or of 8 with `in_bytes`; head h is in
    word h % W, in the four bits from 4 (h // W) on."""
    numbers = torch.randint(0, largest + 1, (3, heads, page), generator=torch.Generator().manual_seed(seed))
    width = -(-heads // (2 if in_bytes else 4))
    words = torch.zeros(3, 1, page, width, dtype=torch.int64)
    for head in range(heads):
        words[:, 0, :, head % width] |= numbers[:, head] << (4 * (head // width))
    signed = torch.where(words < 2**15, words, words - 2**16)
    stored = words.to(torch.uint8) if in_bytes else signed.to(torch.int16)
    return Sizes(2.0 ** ((numbers.double() - 5) / 2)[..., None], stored)


def sized(pages: Pages, own: Sizes) -> Pages:
    """The same pages with token sizes: decoded tokens are multiplied by them."""
    return Pages(replace(pages.stream, sizes=own.words), pages.tokens * own.sizes)


def sized_keys(pages: Pages, rope_tables: RopeTables, own: Sizes) -> Pages:
    """The same pages of keys with token sizes: the distance of a key from the mean is multiplied by its size."""
    mean = rope_tables.mean.double()
    return Pages(replace(pages.stream, sizes=own.words), mean + (pages.tokens - mean) * own.sizes)
