"""A decode step of a budget of important tokens, in numbers: which slots change, and of which rows."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.paging.forward import Forward
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.tiered.sequence_state import TieredSequenceState


class BudgetStep(NamedTuple):
    """One token for each row.

    `ring` is its slot, `free` where the token that leaves the ring goes while slots are free, `first` and `last` the heavy slots
    that it contests for, int64 `[rows]`. The budget of the `contested` rows is full (`rows` on the device; None: of all or of
    none), and who loses goes to page and slot `below`.
    """

    ring: Tensor
    free: Tensor
    first: Tensor
    last: Tensor
    contested: list[int]
    rows: Tensor | None
    below: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(
        forward: Forward,
        sequences: TieredSequenceState,
        tiering: HeavyHitterBudget,
        demotes: bool,
        device: torch.device,
    ) -> "BudgetStep":
        """The step of a forward; who loses goes to a tier below where it `demotes`."""
        sizes = [tiering.sizes(sequences.prompt(row)) for row in range(len(forward.before))]
        contested = [
            row for row, (length, size) in enumerate(zip(forward.before, sizes, strict=True)) if length >= sum(size)
        ]

        def ring(step: Forward) -> list[int]:
            return [length % recent if recent else 0 for length, (_, recent) in zip(step.before, sizes, strict=True)]

        def free(step: Forward) -> list[int]:
            # A ring that is not full takes the token where it stands; then the heavy slots fill up, in order.
            return [
                own if length < recent or length >= heavy + recent else length
                for own, length, (heavy, recent) in zip(ring(step), step.before, sizes, strict=True)
            ]

        def first(_: Forward) -> list[int]:
            return [recent for _, recent in sizes]

        def last(step: Forward) -> list[int]:
            return [
                recent + heavy * (length >= heavy + recent)
                for length, (heavy, recent) in zip(step.before, sizes, strict=True)
            ]

        def below_at(part: int, step: Forward) -> list[int]:
            held = sequences.held_before(step)
            return [sequences.tables[1].location(row, held[row][1])[part] for row in contested]

        below = None
        if contested and demotes:
            pages, positions = (
                forward.tensor(name, partial(below_at, part), device)
                for part, name in enumerate(("pages below", "slots below"))
            )
            below = pages, positions
        some = 0 < len(contested) < len(sizes)
        return BudgetStep(
            forward.tensor("ring", ring, device),
            forward.tensor("free", free, device),
            forward.tensor("first heavy slot", first, device),
            forward.tensor("heavy slots end", last, device),
            contested,
            forward.tensor("contested", lambda _: contested, device) if some else None,
            below,
        )

    def of_contested(self, part: Tensor) -> Tensor:
        """Of a tensor with a row for each the contested ones'."""
        return part if self.rows is None else part[self.rows]
