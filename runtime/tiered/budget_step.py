"""A decode step of a budget of important tokens, as index tensors: which slots change, and in which rows."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from calib.runtime.paging.forward import Forward
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.tiered.sequence_state import TieredSequenceState


class BudgetStep(NamedTuple):
    """The slots that one new token for each row changes; int64 `[rows]`.

    `ring` is the new token's slot. `free` is where the token that leaves the ring goes while heavy slots are free; [`first`,
    `last`) are the heavy slots that it competes for afterwards. The budgets of the `contested` rows are full (`rows` is their
    tensor, or None if they are all rows or none); tokens that lose there are written to page and slot `below`.
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
        """The step of a forward; where it `demotes`, tokens that lose go to a tier below."""
        sizes = [tiering.sizes(sequences.prompt(row)) for row in range(len(forward.before))]
        contested = [
            row for row, (length, size) in enumerate(zip(forward.before, sizes, strict=True)) if length >= sum(size)
        ]

        def ring(step: Forward) -> list[int]:
            return [length % recent if recent else 0 for length, (_, recent) in zip(step.before, sizes, strict=True)]

        def free(step: Forward) -> list[int]:
            # While the ring is not full the new token stays in its ring slot; then the heavy slots are filled in order.
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
        """The contested rows of a tensor with one row for each batch row."""
        return part if self.rows is None else part[self.rows]
