"""Codes for the components of a calibrated basis, in words; the words of a layer's KV heads are stored next to each other.

Codes are packed as in `kernels/pack`: all words of a layer's stream have the same fields; heads may have different numbers of
words. A code stands for a level of its component; levels are equally spaced in [-1, 1].
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
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
    """Codes in words whose fields have `widths` bits; KV head h has `counts[h]` words a token.

    Components y are in plane form: component p W + w is field p of word w, W being the largest of `counts`; a head with fewer words
    does not store the components of the others. A component of b `level_bits` has 2^b levels.
    """

    widths: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def component_codes(self) -> Self:
        """Itself."""
        return self

    @property
    def components(self) -> int:
        """Number of components of y in plane form."""
        return len(self.widths) * max(self.counts)

    @property
    def level_bits(self) -> tuple[int, ...]:
        """Bits of a level's index, for each field of a word."""
        return self.widths

    def token_group(self) -> int:
        """1: tokens are encoded independently."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The words of all heads, next to each other."""
        return {"words": Field(1, sum(self.counts), torch.int16, "codes", shared=True)}

    def fp32_params(self, x: Tensor) -> bool:
        """False: there are no parameters."""
        return False

    def encode_projected(self, x: Tensor, projection: Projection) -> Block | None:
        """Encodes with a kernel that computes the components; None if none supports them."""
        return self.projected(x, projection)[0] if supported(x, self.counts) else None

    @abstractmethod
    def projected(
        self, x: Tensor, projection: Projection, weights: Tensor | None = None
    ) -> tuple[Block, Tensor | None]:
        """Encodes the components of `x [batch, kv_heads, tokens, head_dim]`; with `weights` they are divided by their tokens'
        sizes, and the sizes' numbers are returned as well (`kernels/components`), else None."""

    @abstractmethod
    def rotated_scores(
        self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        """As in `ComponentCodes`: keys are `matrix [kv_heads, D, components + 1]` times the levels' indices c and 1; with `sizes` s
        the matrix has `components + 2` columns, for s c, s and 1."""

    @abstractmethod
    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """Sums of the levels' indices weighted by `weights [..., kv_heads, rows, tokens]` float32."""

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 -> `[..., kv_heads, rows, components]` from the codes."""
        mixed = self.mixed_codes(weights, tile) * self.step(weights.device)
        return mixed + weights.sum(-1, keepdim=True) * self.least(weights.device)

    def levels(self, device: torch.device) -> Tensor:
        """The index of each component's last level: float32 `[components]`."""
        return _of_widths(self.level_bits, max(self.counts), device)[0]

    def step(self, device: torch.device) -> Tensor:
        """The distance between neighbouring levels of each component: float32 `[components]`."""
        return _of_widths(self.level_bits, max(self.counts), device)[1]

    def least(self, device: torch.device) -> Tensor:
        """The value of each component's level 0: float32 `[components]`."""
        return _of_widths(self.level_bits, max(self.counts), device)[2]


@cache
def _of_widths(widths: tuple[int, ...], words: int, device: torch.device) -> Tensor:
    """The last level's index, the step and the value of level 0 of each component, for `words` words with fields of these `widths`:
    float32 `[3, components]`. Cached without a limit, because a captured CUDA graph reads the tensor at its address."""
    each = [width for width in widths for _ in range(words)]
    most, step = [2.0**width - 1 for width in each], [2.0 ** (1 - width) for width in each]
    return upload([most, step, [one / 2 - 1 for one in step]], torch.float32, device)
