"""What a forward does to windows of incomplete chunks: whose chunk goes on, and which rows are taken in together."""

from bisect import bisect_left
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.paging.forward import Forward
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.tiered.sequence_state import TieredSequenceState


class ChunkChanges(NamedTuple):
    """The `most` slots in use before or behind the forward and those `left` behind it, of all rows of the `batch`; rows of which a
    chunk is `going_on` by one token, as a tensor of `rows` where they differ or are not all, and the `slots` of these tokens; and
    the `others` in groups of `_groups`."""

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
        """Those of a forward; worked out by the first layer that asks."""
        key = (ChunkChanges, device)
        if key not in forward.readings:
            forward.readings[key] = _changes(forward, sequences, tiering, device)
        found: ChunkChanges = forward.readings[key]
        return found

    def slots_of(self, rows: range) -> Tensor | int | None:
        """Of `rows` whose chunks all go on where their tokens belong, int64 `[rows, 1, 1]` or one for all; None of others."""
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
    """Rows whose tokens are taken in together: those that hold equally much behind prompts of one length; in a `step` also those
    whose blocks are complete with it, whatever lies before them."""
    groups: dict[Hashable, list[int]] = {}
    for number, rows in enumerate(sequences.equal_length_groups(forward)):
        held, prompt = forward.before[rows[0]], sequences.prompt(rows[0])
        chunk = tiering.chunk_of(tiering.complete(held, prompt), prompt)
        behind_another = step and chunk.start > tiering.sinks
        key = ("block", len(chunk), tiering.exact(held, prompt)) if behind_another else number
        groups.setdefault(key, []).extend(rows)
    return [sorted(rows) for rows in groups.values()]
