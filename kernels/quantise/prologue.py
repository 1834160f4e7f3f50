"""Gathers and affine map of tokens before they are quantised."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prologue:
    """Steps before quantisation: gather tokens by `order`, then y = (x - center) / half * balance. A step whose field is None is
    left out.

    `center`, `half` and `balance` are `[kv_heads, 1, D]` or `[rows, kv_heads, 1, D]`, any float dtype. Where `half` is 0, tokens
    are divided by 1. `order` is int64 `[rows, kv_heads, n]`: token i of the result is token order[i] of x.
    """

    order: Tensor | None = None
    center: Tensor | None = None
    half: Tensor | None = None
    balance: Tensor | None = None

    @property
    def divisor(self) -> Tensor | None:
        """`half` with 0 replaced by 1, or None."""
        return None if self.half is None else torch.where(self.half == 0, 1, self.half)

    @property
    def moves(self) -> bool:
        """Whether tokens are at most gathered, so that their values do not change."""
        return self.center is self.half is self.balance is None

    def gathered(self, x: Tensor) -> Tensor:
        """Gathers x `[rows, kv_heads, T, D]` by `order`: `[rows, kv_heads, n, D]`."""
        return x if self.order is None else x.gather(-2, self.order[..., None].expand(*self.order.shape, x.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Applies all steps to x `[rows, kv_heads, T, D]`: y float32 `[rows, kv_heads, n, D]`."""
        y = self.gathered(x).float()
        y = y if self.center is None else y - self.center
        y = y if (divisor := self.divisor) is None else y / divisor
        return y if self.balance is None else y * self.balance


IDENTITY = Prologue()
