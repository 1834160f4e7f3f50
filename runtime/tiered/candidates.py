"""New tokens together with the important tokens that they compete with."""

from dataclasses import dataclass

from torch import Tensor

from calib.runtime.paging.field import Block


@dataclass
class Candidates:
    """New tokens of rows of equal length, and the important tokens that they compete with.

    Candidate i < `slots` is in slot i of the important tier, with its fields in `held`; the others are the new tokens, the
    first of which has position `before`. `positions` are `[rows, kv_heads, slots + n]`, and `mass` as in `BudgetScores`.
    """

    rows: list[int]
    slots: int
    before: int
    keys: Tensor
    values: Tensor
    mass: Tensor
    positions: Tensor
    held: Block

    def is_new(self, index: Tensor) -> Tensor:
        """Whether candidates `index [rows, kv_heads, m]` are new: bool `[..., 1]`."""
        return (index >= self.slots)[..., None]

    def new(self, index: Tensor, tokens: Tensor) -> Tensor:
        """New `tokens [rows, kv_heads, n, width]` at candidates `index`; undefined for candidates that are not new."""
        return _gathered((index - self.slots).clamp(min=0), tokens)

    def old(self, index: Tensor, tokens: Tensor) -> Tensor:
        """Held `tokens [rows, kv_heads, slots, width]` at candidates `index`; undefined for candidates that are new."""
        return _gathered(index.clamp(max=self.slots - 1), tokens)


def _gathered(index: Tensor, tokens: Tensor) -> Tensor:
    return tokens.gather(2, index[..., None].expand(-1, -1, -1, tokens.shape[3]))
