"""Decode step of a budget of heavy hitters (H2O) in plain torch: scores from attention, and which token is removed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class MassRule:
    """How a token's score follows from the attention that it receives.

    Args:
        adds_up: whether the attention of a forward is added to the mass so far; if not, it replaces it.
        limit: upper limit of a token's mass, or None.
        mean: whether the score is the mass divided by the number of query rows that have seen the token, or the mass itself.
    """

    adds_up: bool = True
    limit: float | None = None
    mean: bool = False

    def observe(self, mass: Tensor, shown: Tensor) -> None:
        """Updates `mass` in place by the attention `shown` of one more forward to tokens that were stored before it."""
        if not self.adds_up:
            mass.copy_(shown)
        else:
            mass += shown
        if self.limit is not None:
            mass.clamp_(max=self.limit)

    def scores(self, mass: Tensor, seen: Tensor) -> Tensor:
        """Scores from `mass [..., tokens]` and the number of query rows that have `seen` each token, of the same shape; with
        `mean` 0 where none has."""
        return (mass / seen).masked_fill_(seen <= 0, 0) if self.mean else mass


class BudgetSlots(NamedTuple):
    """Slots of the heavy hitters and of the ring of recent tokens, for some rows.

    Attributes:
        ring: slot of the new token, int64 `[rows]`, which an older token may occupy.
        free: slot to which that older token moves if no token has to be removed, int64 `[rows]`; `ring` in rows that compete.
        first, last: the older token competes for the slots [first, last), int64 `[rows]`; equal: there is no competition.
        table: pages that the slots are in, int32 `[rows, pages]`.
        positions: position of each token in its row, int32 `[pages, kv_heads, page_tokens, 1]`.
    """

    ring: Tensor
    free: Tensor
    first: Tensor
    last: Tensor
    table: Tensor
    positions: Tensor

    def locations(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Page, and slot in the page, of `slots [rows, kv_heads]`, int64."""
        size = self.positions.shape[2]
        return self.table.long().gather(1, slots // size), slots % size

    def heavy(self, slots: int) -> Tensor:
        """Mask of the slots [first, last) among `slots` slots: bool `[rows, 1, slots]`."""
        numbers = torch.arange(slots, device=self.table.device)
        return (numbers >= self.first[:, None, None]) & (numbers < self.last[:, None, None])


class NewToken(NamedTuple):
    """One field (such as keys) of the new tokens, `token [rows, kv_heads, 1, W]`, and of the pages that they are stored in, `into
    [pages, kv_heads, page_tokens, W]`."""

    into: Tensor
    token: Tensor


def lightest(rule: MassRule, mass: Tensor, entering: Tensor, slots: BudgetSlots) -> tuple[Tensor, Tensor]:
    """Slot of the token with the lowest score among those in [first, last), of equal ones the newest, int64 `[rows, kv_heads]`; and
    whether the score of a token with mass `entering [rows, numbers x kv_heads, 1]` is not higher, bool `[rows, kv_heads]`."""
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
    """As `operation.enter_ring`."""
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
    """Expands slots `[rows, kv_heads]` to an index of `mass [rows, numbers x kv_heads, slots]` along its last axis."""
    return torch.cat([index] * (mass.shape[1] // index.shape[1]), 1)[..., None]
