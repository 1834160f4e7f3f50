"""A decode step of a budget of important tokens, in numbers: which slots change, and of which rows."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.paging.sequence_state import Forward
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.tiered.sequence_state import TieredSequenceState


class BudgetStep(NamedTuple):
    """One token for each row.

    `ring` is its slot, `free` where the token that leaves the ring goes while slots are free, int64 `[rows]`. The budget
    of the `contested` rows is full (`rows` on the device): they contest for the slots `heavy`, bool `[contested, 1,
    slots]`, and who loses goes to page and slot `below`.
    """

    ring: Tensor
    free: Tensor
    contested: list[int]
    rows: Tensor
    heavy: Tensor
    below: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(
        forward: Forward,
        sequences: TieredSequenceState,
        tiering: HeavyHitterBudget,
        demotes: bool,
        slots_held: int,
        device: torch.device,
    ) -> "BudgetStep":
        """The step of a forward whose rows hold `slots_held` slots at most; who loses goes to a tier below where it `demotes`."""
        sizes = [tiering.sizes(sequences.prompt(row)) for row in range(len(forward.before))]

        def ring(step: Forward) -> list[int]:
            return [length % recent if recent else 0 for length, (_, recent) in zip(step.before, sizes, strict=True)]

        def free(step: Forward) -> list[int]:
            # A ring that is not full takes the token where it stands; then the heavy slots fill up, in order.
            return [
                own if length < recent or length >= heavy + recent else length
                for own, length, (heavy, recent) in zip(ring(step), step.before, sizes, strict=True)
            ]

        def below_at(part: int, step: Forward) -> list[int]:
            held = (sequences.held(row, step.before[row])[1] for row in contested)
            return [sequences.tables[1].location(row, count)[part] for row, count in zip(contested, held, strict=True)]

        contested = [
            row for row, (length, size) in enumerate(zip(forward.before, sizes, strict=True)) if length >= sum(size)
        ]
        slots = torch.arange(slots_held, device=device)
        first = forward.tensor("recent", lambda _: [sizes[row][1] for row in contested], device)[:, None, None]
        last = forward.tensor("budget", lambda _: [sum(sizes[row]) for row in contested], device)[:, None, None]
        below = None
        if contested and demotes:
            pages, positions = (
                forward.tensor(name, partial(below_at, part), device)
                for part, name in enumerate(("pages below", "slots below"))
            )
            below = pages, positions
        index = forward.tensor("contested", lambda _: contested, device)
        return BudgetStep(
            forward.tensor("ring", ring, device),
            forward.tensor("free", free, device),
            contested,
            index,
            (slots >= first) & (slots < last),
            below,
        )
