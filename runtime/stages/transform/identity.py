"""No transform: tokens are encoded as they are."""

from dataclasses import dataclass

from torch import Tensor

from calib.kernels.attend.operation import ChannelMap
from calib.kernels.quantise.prologue import IDENTITY, Prologue
from calib.runtime.stages.contract import Transform


@dataclass(frozen=True)
class Identity(Transform):
    """T x = x."""

    def prologue(self) -> Prologue:
        """The prologue that changes nothing."""
        return IDENTITY

    def forward(self, x: Tensor) -> Tensor:
        """`x` in float32."""
        return x.float()

    def inverse(self, y: Tensor) -> Tensor:
        """`y` itself."""
        return y

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """The query itself; nothing to add."""
        return query, None

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """`mixed` itself."""
        return mixed

    def channel_map(self) -> ChannelMap:
        """The map that changes nothing."""
        return ChannelMap()

    def tensors(self) -> list[Tensor]:
        """None."""
        return []
