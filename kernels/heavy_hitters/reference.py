"""A new token of each row among the important ones, in plain torch: what attention is worth, and who loses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class MassRule:
    """What the attention that a token gets makes it worth.

    Args:
        adds_up: whether a forward's attention is added to what was there; if not, it takes its place.
        limit: the most that a token's mass becomes, or None.
        mean: whether a token is worth its mass divided by the number of query rows that have seen it, or the mass itself.
    """

    adds_up: bool = True
    limit: float | None = None
    mean: bool = False

    def observe(self, mass: Tensor, shown: Tensor) -> None:
        """Takes into `mass`, in place, what one more forward has `shown` of tokens that were held before it."""
        if not self.adds_up:
            mass.copy_(shown)
        else:
            mass += shown
        if self.limit is not None:
            mass.clamp_(max=self.limit)

    def scores(self, mass: Tensor, seen: Tensor) -> Tensor:
        """`mass [..., tokens]`, which so many rows have `seen [..., tokens]` -> scores of the same shape; 0 where none has."""
        return (mass / seen).masked_fill_(seen <= 0, 0) if self.mean else mass


class BudgetSlots(NamedTuple):
    """Where the important tokens of some rows lie, and what the new ones do.

    Attributes:
        ring: int64 `[rows]`, the slot of the new token, from which an older one may have to go.
        free: int64 `[rows]`, the slot to which that one goes where nobody has to lose one.
        first, last: int64 `[rows]`, it contests for the slots [first, last); none where both are equal.
        table: int32 `[rows, pages]`, the pages that slots lie in.
        positions: int32 `[pages, kv_heads, page_tokens, 1]`, of tokens in their rows.
    """

    ring: Tensor
    free: Tensor
    first: Tensor
    last: Tensor
    table: Tensor
    positions: Tensor

    def locations(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Page and slot in it, int64, of `slots [rows, kv_heads]`."""
        size = self.positions.shape[2]
        return self.table.long().gather(1, slots // size), slots % size

    def heavy(self, slots: int) -> Tensor:
        """Which of so many slots are contested: bool `[rows, 1, slots]`."""
        numbers = torch.arange(slots, device=self.table.device)
        return (numbers >= self.first[:, None, None]) & (numbers < self.last[:, None, None])


class NewToken(NamedTuple):
    """A field of the new tokens, `token [rows, kv_heads, 1, W]`, and of the pages that it goes into, `into [pages, kv_heads,
    page_tokens, W]`."""

    into: Tensor
    token: Tensor


def lightest(rule: MassRule, mass: Tensor, entering: Tensor, slots: BudgetSlots) -> tuple[Tensor, Tensor]:
    """The slot of the lightest contested token of each row and head, int64 `[rows, kv_heads]`, of equals the newest; and whether a
    token of mass `entering [rows, numbers x kv_heads, 1]` is no heavier."""
    heads = slots.positions.shape[1]
    scores = rule.scores(mass[:, :heads], mass[:, -heads:])
    heavy = scores.masked_fill(~slots.heavy(scores.shape[2]), torch.inf)
    least = heavy.amin(-1, keepdim=True)
    positions = slots.positions[slots.table.long()].transpose(1, 2).flatten(2)[..., : scores.shape[2]]
    found = positions.masked_fill(heavy > least, -1).argmax(-1)
    return found, (rule.scores(entering[:, :heads], entering[:, -heads:]) <= least)[..., 0]


def enter_ring(
    rule: MassRule | None, mass: Tensor, shown: Tensor, fresh: Tensor, slots: BudgetSlots, tokens: Sequence[NewToken]
) -> list[Tensor]:
    """See `operation.enter_ring`."""
    heads = slots.positions.shape[1]
    ring = slots.ring[:, None].expand(-1, heads)
    target = slots.free[:, None].expand(-1, heads)
    if rule is not None:
        rule.observe(mass[:, :, : shown.shape[2]], shown)
        at_ring, numbers = _of_numbers(ring, mass), mass.gather
        entering = numbers(2, at_ring)
        lost, lighter = lightest(rule, mass, entering, slots)
        contested = (slots.first < slots.last)[:, None]
        target = torch.where(contested & ~lighter, lost, target)
        mass.scatter_(2, _of_numbers(target, mass), entering)
        mass.scatter_(2, at_ring, fresh)
    (page, slot), (to_page, to_slot) = slots.locations(ring), slots.locations(target)
    found, head = [], torch.arange(heads, device=mass.device)
    for into, token in tokens:
        old: Any = into[page, head, slot]
        found.append(into[to_page, head, to_slot][:, :, None])
        into[to_page, head, to_slot] = old
        into[page, head, slot] = token[:, :, 0].to(into.dtype)
    return found


def _of_numbers(index: Tensor, mass: Tensor) -> Tensor:
    """An index of tokens `[rows, kv_heads]` as one of `mass [rows, numbers x kv_heads, slots]`."""
    return torch.cat([index] * (mass.shape[1] // index.shape[1]), 1)[..., None]
