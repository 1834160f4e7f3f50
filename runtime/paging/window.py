"""The exact window of keys or of values: a ring buffer of the newest tokens of every row, in the model's dtype.

Token t of a row is in slot t % size. Only the slots in use are allocated (in steps of `STEP`), because a window of 128 exact
tokens takes as much memory as 700 tokens at 3 bits. Where graphs replay steps, all slots are allocated: their addresses must
not change.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from calib.runtime.device.row_index import row_index
from calib.runtime.files.state import State, tensor_like

STEP = 32


class Window:
    """The ring buffers of all rows, `tokens [rows, kv_heads, slots, head_dim]`."""

    def __init__(self, size: int, like: Tensor, keeps_room: bool = False) -> None:
        """An empty ring of `size` slots, for rows and heads of `like [rows, kv_heads, any, head_dim]`. With `keeps_room` all
        slots are allocated, however many are in use."""
        self.size, self.keeps_room = size, keeps_room
        self.tokens = like.new_zeros(like.shape[0], like.shape[1], 0, like.shape[3])

    def allocated(self, slots: int) -> int:
        """How many slots are allocated when `slots` are in use."""
        return self.size if self.keeps_room else self._in_steps(slots)

    def _in_steps(self, slots: int) -> int:
        return min(self.size, -(-slots // STEP) * STEP)

    def resize(self, slots: int) -> None:
        """Allocates memory for `slots` slots in use; keeps the content of slots that remain."""
        count, held = self.allocated(slots), self.tokens.shape[2]
        if count != held:
            kept = min(count, held)
            # Zeros: an empty slot is masked, but a NaN in it would still reach the sum.
            tokens = self.tokens.new_zeros(*self.tokens.shape[:2], count, self.tokens.shape[3])
            tokens[:, :, :kept] = self.tokens[:, :, :kept]
            self.tokens = tokens

    def leading(self, rows: range, slots: int) -> Tensor:
        """The first `slots` slots of `rows`, or all that are allocated: `[len(rows), kv_heads, slots, head_dim]`."""
        if len(rows) == self.tokens.shape[0] and slots >= self.tokens.shape[2]:
            return self.tokens
        return self.tokens[rows.start : rows.stop, :, :slots]

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        self.tokens = self.tokens.index_select(0, sources)

    def state(self, slots: int) -> State:
        """The tokens, of which `slots` slots are in use, for a file; the same with and without `keeps_room`."""
        return {"tokens": self.tokens[:, :, : self._in_steps(slots)].contiguous()}

    def restore(self, state: State, slots: int) -> None:
        """Fills the window from `state`, as `state(slots)` returned it."""
        rows, heads, _, dim = self.tokens.shape
        self.tokens = tensor_like(state, "tokens", self.tokens.new_empty(rows, heads, self._in_steps(slots), dim))
        self.resize(slots)

    def in_order(self, rows: list[int], start: int, stop: int) -> Tensor:
        """Tokens [start, stop) of `rows` in order: `[len(rows), kv_heads, stop - start, head_dim]`."""
        own = self.tokens[row_index(rows, self.tokens.device)]
        runs = [own[:, :, slot : slot + count] for slot, count in self._runs(start, stop)]
        return runs[0] if len(runs) == 1 else torch.cat([own[:, :, :0], *runs], 2)

    def write(self, rows: list[int], start: int, tokens: Tensor) -> None:
        """Writes `tokens [len(rows), kv_heads, n, head_dim]` as tokens `start` ... `start` + n - 1 of `rows` (n <= size)."""
        index, done = row_index(rows, tokens.device), 0
        for slot, count in self._runs(start, start + tokens.shape[2]):
            self.tokens[index, :, slot : slot + count] = tokens[:, :, done : done + count]
            done += count

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(first slot, number of slots) of each contiguous part of the ring that holds tokens [start, stop)."""
        while start < stop:
            slot = start % self.size
            count = min(stop - start, self.size - slot)
            yield slot, count
            start += count
