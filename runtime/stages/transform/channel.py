"""Maps of each channel on its own: a scale (ZipCache, arXiv:2405.14256, eq. 6), or a scale and a centre."""

from dataclasses import dataclass

from torch import Tensor

from calib.kernels.attend.operation import ChannelMap
from calib.kernels.quantise.prologue import Prologue
from calib.kernels.to_half import NARROW
from calib.runtime.stages.contract import Transform


@dataclass(frozen=True, eq=False)
class ChannelRange(Transform):
    """y = (x - center) / half: a calibrated range [center - half, center + half] becomes [-1, 1].

    `center`, `half`: `[..., kv_heads, 1, head_dim]`, `half` > 0; a constant channel has `half` = `NARROW`, so that it
    is decoded to its centre.
    """

    center: Tensor
    half: Tensor

    @classmethod
    def between(cls, low: Tensor, high: Tensor) -> "ChannelRange":
        """From the calibrated extremes `low`, `high`: float32 `[kv_heads, head_dim]`."""
        half = (high - low) / 2
        return cls(((high + low) / 2)[:, None], half.clamp(min=NARROW)[:, None])

    def prologue(self) -> Prologue:
        """(x - center) / half."""
        return Prologue(center=self.center, half=self.half)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., kv_heads, tokens, head_dim]` -> float32 of the same shape."""
        return self.prologue().forward(x)

    def inverse(self, y: Tensor) -> Tensor:
        """Undoes `forward`."""
        return y * self.half + self.center

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """q.x = (q half).y + q.center."""
        return query * self.half, (query * self.center).sum(-1, keepdim=True)

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum p x = half * sum p y + center * sum p."""
        return mixed * self.half + self.center * mass

    def channel_map(self) -> ChannelMap:
        """x = half y + center."""
        return ChannelMap(self.half, self.center)

    def tensors(self) -> list[Tensor]:
        """Centre and half range."""
        return [self.center, self.half]


@dataclass(frozen=True, eq=False)
class ChannelScale(Transform):
    """y = x / scale, one scale a channel: outlier channels no longer widen the range of a token (ZipCache, eq. 6).

    `scale`: float32 `[kv_heads, 1, head_dim]`, 0 or more; where it is 0, y and what is decoded from it are 0.
    """

    scale: Tensor

    def prologue(self) -> Prologue:
        """x / scale; a channel whose scale is 0 has only zeros."""
        return Prologue(half=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., kv_heads, tokens, head_dim]` -> float32 of the same shape."""
        return self.prologue().forward(x)

    def inverse(self, y: Tensor) -> Tensor:
        """Undoes `forward`."""
        return y * self.scale

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """q.x = (q scale).y."""
        return query * self.scale, None

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum p x = scale * sum p y."""
        return mixed * self.scale

    def channel_map(self) -> ChannelMap:
        """x = scale y."""
        return ChannelMap(self.scale)

    def tensors(self) -> list[Tensor]:
        """The scale."""
        return [self.scale]
