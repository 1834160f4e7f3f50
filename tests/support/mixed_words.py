"""Random pages of words whose fields differ in width, with the words of all heads of a token side by side, and their decoding.

P is the fields (planes) of a word, Wm the most words of a head, W the words of all heads, H the heads.
"""

from dataclasses import dataclass

import numpy as np
import torch
from paged_attention import Kind, Pages, pages_of
from trellis_paths import trellis_components

from calib.kernels.attend.operation import PackedStream
from calib.kernels.pack.heads import join_heads, spread_heads
from calib.kernels.pack.reference import pack, unpack

PAGE = 64


@dataclass(frozen=True)
class Words:
    """The `widths` of a word's fields and the word `counts` of the heads; with `trellis`, words of trellis-coded levels."""

    widths: tuple[int, ...]
    counts: tuple[int, ...]
    trellis: bool = False

    def __str__(self) -> str:
        return "-".join(map(str, self.widths)) + "x" + "-".join(map(str, self.counts)) + "t" * self.trellis

    def own(self) -> torch.Tensor:
        """Which components, plane by plane, a head has words for: bool `[H, 1, P * Wm]`."""
        most = max(self.counts)
        return (torch.arange(most) < torch.tensor(self.counts)[:, None, None]).repeat(1, 1, len(self.widths))

    def levels(self) -> torch.Tensor:
        """Number of levels of each component, `[P * Wm]`."""
        return torch.tensor([2 ** (width + self.trellis) for width in self.widths]).repeat_interleave(max(self.counts))

    def drawn(self, count: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Random pages, int16 `[count, 1, PAGE, W]`, and their numbers, int64 `[count, H, PAGE, P * Wm]`, 0 without a word."""
        levels = self.levels()
        codes = (torch.rand(count, len(self.counts), PAGE, len(levels), generator=draw) * levels).floor().long()
        if not self.trellis:
            codes *= self.own()
            return join_heads(pack(codes, self.widths), self.counts).contiguous(), codes
        words = torch.randint(-(2**15), 2**15, (count, 1, PAGE, sum(self.counts)), generator=draw).to(torch.int16)
        return words, self.numbers(words)

    def numbers(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack words, int16 `[..., 1, PAGE, W]`, to numbers, int64 `[..., H, PAGE, P * Wm]`; of a trellis, to level numbers."""
        if not self.trellis:
            return unpack(spread_heads(words.mT, self.counts).mT, self.widths, len(self.levels())).long()
        y = np.nan_to_num(trellis_components(words.contiguous().numpy(), self.widths, self.counts), nan=-1.0)
        return (torch.from_numpy(y + 1) * (self.levels() / 2)).floor().long()

    def stream(self, pages: torch.Tensor, **more: object) -> PackedStream:
        """The `PackedStream` of these pages; `more` are further arguments of it."""
        wide = len(self.levels())
        return PackedStream(self.widths, pages, wide, counts=self.counts, trellis=self.trellis, **more)


NARROW, WIDE = Words((6, 4, 3, 2, 1), (3, 0, 5)), Words((7, 5, 4), (16, 16, 16))


def stored(own: Words | Kind, seed: int, count: int = 3) -> Pages:
    """Random pages; of `Words`, every component of a head has a scale and a zero point of its own."""
    if isinstance(own, Kind):
        return pages_of(own, (count, 3, PAGE, 32), seed)
    draw = torch.Generator().manual_seed(seed)
    heads, levels = len(own.counts), own.levels()
    pages, codes = own.drawn(count, draw)
    steps = torch.rand(heads, 1, len(levels), generator=draw).add(0.5).div(levels)
    zeros = steps * levels * (torch.rand(heads, 1, len(levels), generator=draw) * 0.4 - 0.7) * own.own()
    assert pages.shape == (count, 1, PAGE, sum(own.counts))
    return Pages(own.stream(pages, fixed=(steps, zeros)), codes * steps.double() + zeros.double())
