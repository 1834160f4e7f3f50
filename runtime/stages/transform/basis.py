"""Calibrated components of a head (from the eigenvectors of its weighted covariance), in units of their quantiser's ranges.

    y = E (x - mean)        x^ = mean + M y^        q.x^ = q.mean + (M^T q).y^

Components that get no bits are left out of E and M, so both folds are smaller than a head. For values, and for keys after RoPE,
attention never decodes to channels: the query is folded once a step, and the weighted sum of codes once at the end.

The last bit of a matrix product depends on how many tokens share it, and codes must not: so y is a sum of whole numbers, exact
in float64 in any order. A token then has the same codes alone, in any batch, and on any device.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from calib.kernels.attend.operation import CodeFold, RopeTables
from calib.kernels.attend.reference import folded
from calib.kernels.components.projection import TOKEN_BITS, Projection
from calib.runtime.stages.contract import Transform

if TYPE_CHECKING:
    from calib.runtime.stages.transform.measured import Measured

# x - mean is clamped to at least so many standard deviations of its channel.
REACH = 64
LEAST_UNIT = 2.0**-100  # for a channel without variance, so that the inverse is finite
ENTRY = 2**15 - 1  # the largest entry of E


@dataclass(frozen=True, eq=False)
class Basis(Transform):
    """The transform of one layer's keys or values, with N components. Tables have 16 bits an entry, rounded to far below a step.

    Args:
        mean: float32 `[kv_heads, 1, D]`.
        unit: float32 `[kv_heads, 1, D]`, a power of two for each channel; x - mean is rounded to multiples of it.
        into: int16 `[kv_heads, D, N]`: E, in units of channels and components.
        scale: float32 `[kv_heads, 1, N]`: powers of two, the components' units.
        back: float16 `[kv_heads, N, D]`: M, transposed, for a step of each component's codes, in units of `size`.
        size: float32 `[kv_heads, 1, 1]`, powers of two.
        gain: float32 `[kv_heads, 1, N]`, powers of two: `size` over the codes' steps, so that M is the product of `back` and it.
        origin: float32 `[kv_heads, 1, D]`: x^ where all codes are 0, of a token of size 1.
        sized: whether codes are of tokens over their own size (`codec/sized.py`).
    """

    mean: Tensor
    unit: Tensor
    into: Tensor
    scale: Tensor
    back: Tensor
    size: Tensor
    gain: Tensor
    origin: Tensor
    sized: bool = False

    @classmethod
    def of(
        cls,
        mean: Tensor,
        into: Tensor,
        back: Tensor,
        spread: Tensor,
        step: Tensor,
        least: Tensor,
        sized: bool = False,
    ) -> "Basis":
        """From E `into [kv_heads, D, N]` and M `back [kv_heads, N, D]` float64, the channels' standard deviations `spread
        [kv_heads, D]`, the `step [N]` of codes, powers of two, and the `least [N]` that a code of 0 stands for."""
        unit = (_power(spread.double() * REACH)[:, None] / 2**TOKEN_BITS).clamp(min=LEAST_UNIT)
        entries = into.double() * unit.mT  # of a component, for one unit of a channel
        scale = _power(entries.abs().amax(1, keepdim=True) / ENTRY)
        a_step = back * step.double()[:, None]
        size = _power(a_step.abs().amax((1, 2), keepdim=True))
        stored = (a_step / size).half()
        origin = mean.double()[:, None] + ((least.double() / step.double()) @ stored.double())[:, None] * size
        return cls(
            mean.float()[:, None],
            unit.float(),
            (entries / scale).round().to(torch.int16),
            scale.float(),
            stored,
            size.float(),
            (size / step.double()).float(),
            origin.float(),
            sized,
        )

    @property
    def components(self) -> int:
        """N, the width of y."""
        return self.back.shape[-2]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., kv_heads, tokens, D]` -> y float32 `[..., kv_heads, tokens, N]`."""
        whole = (x - self.mean).mul_(1 / self.unit).round_().clamp_(-(2**TOKEN_BITS), 2**TOKEN_BITS)
        return (whole.double() @ self.into.double()).float().mul_(self.scale)

    def projection(self) -> Projection:
        """`forward` as kernels do it: the tables mean, unit, into and scale."""
        return Projection(self.mean, self.unit, self.into, self.scale)

    def inverse(self, y: Tensor) -> Tensor:
        """x^ float32 `[..., kv_heads, tokens, D]` from decoded y."""
        return (y * self.gain) @ self.back.float() + self.mean

    def inverse_of_codes(self, codes: Tensor, sizes: Tensor | None) -> Tensor:
        """x^ float32 `[..., kv_heads, tokens, D]` of codes `[..., kv_heads, tokens, N]`, whole numbers, and of tokens' sizes
        float32 `[..., kv_heads, tokens, 1]`, if there are any. The bits do not depend on the number of tokens: float16 entries are
        multiples of 2^-24 up to 1, and their sums with codes of 8 bits are exact in float64 up to 2^21 components."""
        moved = (codes.double() @ self.back.double()).float().mul_(self.size)
        if sizes is None:
            return moved.add_(self.origin)
        return moved.add_(self.origin - self.mean).mul_(sizes).add_(self.mean)

    def of_codes(self) -> Tensor:
        """The matrix of x^ = size back^T c + origin for codes c and a 1 after them: float32 `[kv_heads, D, N + 1]`. For tokens
        with a size s, of x^ = size back^T s c + s (origin - mean) + mean: `[kv_heads, D, N + 2]`."""
        offsets = [self.origin - self.mean, self.mean] if self.sized else [self.origin]
        return torch.cat([self.back.float() * self.size, *offsets], -2).mT

    def code_fold(self) -> CodeFold:
        """The tables of sum p x^ = size back^T sum p c + origin sum p."""
        return CodeFold(self.back, self.size, self.origin, self.mean if self.sized else None)

    def fold_codes(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum p x^ from `mixed` = sum p c and `mass` = sum p; with sizes s `mixed` is sum p s c and then sum p s."""
        return folded(self.code_fold(), mixed[..., : self.components], mass, mixed[..., self.components :])

    def rope_tables(self, coarse: Tensor, fine: Tensor) -> RopeTables:
        """The tables with which a kernel decodes keys and rotates them."""
        return RopeTables(self.back, self.size, self.mean, coarse, fine)

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """(M^T q, q.mean)."""
        return (query @ self.back.float().mT).mul_(self.gain), (query * self.mean).sum(-1, keepdim=True)

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum p x^ = M sum p y^ + mean sum p."""
        return (mixed * self.gain) @ self.back.float() + self.mean * mass

    def tensors(self) -> list[Tensor]:
        """All tables."""
        return [self.mean, self.unit, self.into, self.scale, self.back, self.size, self.gain, self.origin]


def coded_width(transform: "Transform | Measured", channels: int) -> int:
    """The width of a token of `channels` channels after `transform`, which is what the codec encodes."""
    return channels if transform.components is None else transform.components


def _power(x: Tensor) -> Tensor:
    """The least power of two that is no less than x float64, above 0."""
    mantissa, exponent = torch.frexp(x.clamp(min=math.ldexp(1.0, -126)))
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))
