"""Codes for the components of a calibrated basis, in words that all KV heads of a layer lay side by side.

Words lie as `kernels/pack` says: all words of a layer's stream have the same fields, and heads differ in how many they have. What
a code says of its component is a level in [-1, 1], one step from the next.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from calib.kernels.components.operation import supported
from calib.kernels.components.projection import Projection
from calib.kernels.upload import upload
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.contract import Codec, Segment


@dataclass(frozen=True)
class WordCodes(Codec):
    """`widths` of a word's fields, and `counts` of words a token for each KV head.

    y comes in plane form: component p W + w is field p of word w, W being the most words of any head; a head with fewer has
    nothing in the others. There are 2^b levels for a component of b `level_bits`.
    """

    widths: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def component_codes(self) -> Self:
        """Itself."""
        return self

    @property
    def components(self) -> int:
        """Of y."""
        return len(self.widths) * max(self.counts)

    @property
    def level_bits(self) -> tuple[int, ...]:
        """Of each field: the bits of its levels' numbers."""
        return self.widths

    def token_group(self) -> int:
        """Every token stands alone."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The words of all heads, side by side."""
        return {"words": Field(1, sum(self.counts), torch.int16, "codes", shared=True)}

    def fp32_params(self, x: Tensor) -> bool:
        """No: there is no parameter."""
        return False

    def encode_projected(self, x: Tensor, projection: Projection) -> Block | None:
        """By a kernel that makes components, where one does."""
        return self.projected(x, projection)[0] if supported(x, self.counts) else None

    @abstractmethod
    def projected(
        self, x: Tensor, projection: Projection, weights: Tensor | None = None
    ) -> tuple[Block, Tensor | None]:
        """A block of the components of `x [batch, kv_heads, tokens, head_dim]`; with `weights` of those over their tokens' sizes,
        and the numbers of these (`kernels/components`)."""

    @abstractmethod
    def turned_scores(
        self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        """Keys are `matrix [kv_heads, D, components + 1]` times the levels' numbers and 1; with `sizes` s there are
        `components + 2` columns, for s c, s and 1."""

    @abstractmethod
    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 times the levels' numbers."""

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 -> `[..., kv_heads, rows, components]` from the codes."""
        mixed = self.mixed_codes(weights, tile) * self.step(weights.device)
        return mixed + weights.sum(-1, keepdim=True) * self.least(weights.device)

    def levels(self, device: torch.device) -> Tensor:
        """The number of each component's last level: float32 `[components]`."""
        return _of_widths(self.level_bits, max(self.counts), device)[0]

    def step(self, device: torch.device) -> Tensor:
        """The distance of two levels: float32 `[components]`."""
        return _of_widths(self.level_bits, max(self.counts), device)[1]

    def least(self, device: torch.device) -> Tensor:
        """What level 0 is: float32 `[components]`."""
        return _of_widths(self.level_bits, max(self.counts), device)[2]


@lru_cache
def _of_widths(widths: tuple[int, ...], words: int, device: torch.device) -> Tensor:
    """Of the levels of so many `words` with fields of these `widths`: the last one's number, the step, and what level 0 is, float32
    `[3, components]`."""
    each = [width for width in widths for _ in range(words)]
    most, step = [2.0**width - 1 for width in each], [2.0 ** (1 - width) for width in each]
    return upload([most, step, [one / 2 - 1 for one in step]], torch.float32, device)
