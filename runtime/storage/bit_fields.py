"""Bit fields of any widths, packed without gaps into a token's 16-bit words, the first in the lowest bits of the first word.

The words of a cache (`kernels/pack/README.md`) all have one pattern, so that attention can read single components. A chunk is
unpacked as a whole, so each component may have a width of its own.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from calib.kernels.pack.reference import WORD_BITS
from calib.kernels.upload import upload


@dataclass(frozen=True)
class BitFields:
    """Fields of these `widths`, 1 ... 8 bits each."""

    widths: tuple[int, ...]

    @cached_property
    def words(self) -> int:
        """Number of words of a token."""
        return -(-sum(self.widths) // WORD_BITS)

    def packed(self, numbers: Tensor) -> Tensor:
        """Packs `numbers [tokens, fields]`, each below 2^width, into int16 `[tokens, words]`."""
        word, shift, _ = self._places(numbers.device)
        shifted = numbers.to(torch.int32) << shift
        # One extra word, for the upper part of the last field, which is 0.
        found = torch.zeros(len(numbers), self.words + 1, dtype=torch.int32, device=numbers.device)
        found.index_add_(1, word, shifted & 0xFFFF).index_add_(1, word + 1, shifted >> WORD_BITS)
        return found[:, : self.words].to(torch.int16)

    def unpacked(self, words: Tensor) -> Tensor:
        """Unpacks int16 `[tokens, words]` into int32 `[tokens, fields]`."""
        word, shift, mask = self._places(words.device)
        whole = torch.nn.functional.pad(words.to(torch.int32) & 0xFFFF, (0, 1))
        return ((whole[:, word] >> shift) | (whole[:, word + 1] << (WORD_BITS - shift))) & mask

    def _places(self, device: torch.device) -> Tensor:
        """For each field the word in which it begins, its first bit there, and its mask: int32 `[3, fields]`."""
        first = list(accumulate(self.widths[:-1], initial=0))
        words, shifts = [bit // WORD_BITS for bit in first], [bit % WORD_BITS for bit in first]
        return upload([words, shifts, [(1 << width) - 1 for width in self.widths]], torch.int32, device)
