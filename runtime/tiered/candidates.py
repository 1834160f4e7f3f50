"""New tokens and the important ones they compete with, side by side."""

from dataclasses import dataclass

from torch import Tensor

from calib.runtime.paging.field import Block


@dataclass
class Candidates:
    """New tokens of rows of equal length, and the important ones that they meet.

    Candidate i < `slots` lies in slot i of the important tier and is in `held`; the others are the new tokens, of which
    the first is token `before` of its row. `positions` are `[rows, kv_heads, slots + n]`, and `mass` as a `BudgetScores` has it.
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
        """bool `[..., 1]` of candidates `index [rows, kv_heads, m]`."""
        return (index >= self.slots)[..., None]

    def new(self, index: Tensor, tokens: Tensor) -> Tensor:
        """Those of new `tokens [rows, kv_heads, n, width]`; for a candidate that is not new, any."""
        return _gathered((index - self.slots).clamp(min=0), tokens)

    def old(self, index: Tensor, tokens: Tensor) -> Tensor:
        """Those of held `tokens [rows, kv_heads, slots, width]`; for a candidate that is new, any."""
        return _gathered(index.clamp(max=self.slots - 1), tokens)


def _gathered(index: Tensor, tokens: Tensor) -> Tensor:
    return tokens.gather(2, index[..., None].expand(-1, -1, -1, tokens.shape[3]))
