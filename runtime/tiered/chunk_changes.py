"""What a forward does to the windows of incomplete chunks: which rows only append a token, and which are encoded together."""

from bisect import bisect_left
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.paging.forward import Forward
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.tiered.sequence_state import TieredSequenceState


class ChunkChanges(NamedTuple):
    """Window slots before and after a forward, and the rows by what happens to them.

    `most` is the largest number of slots in use before or after the forward, `left` that after it, `batch` the number of rows.
    In the rows `going_on` one token is appended to a chunk that stays incomplete, in `slots`; `rows` is their tensor where
    slots differ or they are not all rows. The `others` are grouped as `_groups` says.
    """

    most: int
    left: int
    batch: int
    going_on: list[int]
    rows: Tensor | None
    slots: Tensor | int
    others: list[list[int]]

    @staticmethod
    def of(
        forward: Forward, sequences: TieredSequenceState, tiering: RatioTiers, device: torch.device
    ) -> "ChunkChanges":
        """The changes of a forward; computed by the first layer that asks."""
        key = (ChunkChanges, device)
        if key not in forward.readings:
            forward.readings[key] = _changes(forward, sequences, tiering, device)
        found: ChunkChanges = forward.readings[key]
        return found

    def slots_of(self, rows: range) -> Tensor | int | None:
        """The slots of the new tokens of `rows`, if the chunks of all of them go on: int64 `[rows, 1, 1]` or one number; else
        None."""
        first = bisect_left(self.going_on, rows.start)
        own = slice(first, first + len(rows))
        if self.going_on[own] != list(rows):
            return None
        return self.slots if isinstance(self.slots, int) else self.slots[own, None, None]


def _changes(
    forward: Forward, sequences: TieredSequenceState, tiering: RatioTiers, device: torch.device
) -> ChunkChanges:
    exact, left = (of_rows.exact for of_rows in sequences.slots(forward))
    step = forward.width == 1 and forward.columns is None
    going_on = [row for row, (one, other) in enumerate(zip(exact, left, strict=True)) if step and other > one]
    groups = _groups(forward, sequences, tiering, step)
    others = [rows for rows in ([row for row in rows if row not in going_on] for rows in groups) if rows]
    slots: Tensor | int = 0
    index: Tensor | None = None

    def before(step: Forward) -> list[int]:
        held = sequences.slots(step)[0].exact
        return held if len(going_on) == len(held) else [held[row] for row in going_on]

    if going_on:
        slots = exact[going_on[0]]
        level = len(going_on) == len(exact) == exact.count(slots) and not forward.of_block
        if not level:
            index = forward.tensor("rows that go on", lambda _: going_on, device)
            slots = forward.tensor("their slots", before, device)
    return ChunkChanges(max(exact + left), max(left), len(exact), going_on, index, slots, others)


def _groups(forward: Forward, sequences: TieredSequenceState, tiering: RatioTiers, step: bool) -> list[list[int]]:
    """Groups of rows whose tokens are stored together: rows of equal length with prompts of equal length. In a decode `step`,
    rows whose block becomes complete are also grouped, whatever their lengths."""
    groups: dict[Hashable, list[int]] = {}
    for number, rows in enumerate(sequences.equal_length_groups(forward)):
        held, prompt = forward.before[rows[0]], sequences.prompt(rows[0])
        chunk = tiering.chunk_of(tiering.complete(held, prompt), prompt)
        behind_another = step and chunk.start > tiering.sinks
        key = ("block", len(chunk), tiering.exact(held, prompt)) if behind_another else number
        groups.setdefault(key, []).extend(rows)
    return [sorted(rows) for rows in groups.values()]
