"""MiKV's balancer (arXiv:2402.18096, eq. 2-4): it evens out the outlier channels of keys and queries."""

from dataclasses import dataclass

from torch import Tensor

from calib.kernels.attend.operation import ChannelMap
from calib.kernels.quantise.prologue import Prologue
from calib.runtime.stages.contract import Transform


@dataclass(frozen=True, eq=False)
class Balancer(Transform):
    """y = x * balance, and the query is divided by it once a step. `balance`: `[..., kv_heads, 1, head_dim]`, > 0."""

    balance: Tensor

    def prologue(self) -> Prologue:
        """x * balance."""
        return Prologue(balance=self.balance)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., kv_heads, tokens, head_dim]` -> float32 of the same shape."""
        return self.prologue().forward(x)

    def inverse(self, y: Tensor) -> Tensor:
        """Undoes `forward`."""
        return y / self.balance

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """q.x = (q / balance).y."""
        return query / self.balance, None

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum p x = sum p y / balance."""
        return mixed / self.balance

    def channel_map(self) -> ChannelMap:
        """x = y / balance."""
        return ChannelMap(self.balance, divides=True)

    def tensors(self) -> list[Tensor]:
        """The balancer."""
        return [self.balance]
