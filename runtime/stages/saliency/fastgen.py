"""FastGen: every KV head goes by the cheapest policy that recovers enough of the prompt's attention (arXiv:2310.01801)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.heavy_hitters.operation import MassRule
from calib.kernels.top_k.operation import top_k
from calib.runtime.stages.selection import Saliency

# A policy is what a head keeps besides its newest tokens: special ones, those with the most attention, or both.
SPECIAL, FREQUENT = 1, 2
PINNED = 2.0**31  # what a special token weighs: more than any attention or position, and what a file may hold


@dataclass(frozen=True)
class FastGen(Saliency):
    """A token's weight is its attention, or its position where a head goes by locality alone, or `PINNED`.

    The policies, cheapest first, are locality, special tokens + locality, frequency + locality, and all three. All heads of a layer
    hold equally many tokens, so a policy does not say how many a head keeps, but which: what special and frequent tokens leave of
    the budget is for the newest ones.

    Args:
        recovery: share of the prompt's attention that the tokens of a policy must have got, in (0, 1] (section 3.2, T).
        special_ids: special tokens and punctuation; without any, the policies with special tokens are left out.
    """

    recovery: float
    special_ids: tuple[int, ...] = ()

    by_budget = True
    rule = MassRule(limit=PINNED)  # what is pinned gains nothing, so that of special tokens the earlier stay

    @property
    def policies(self) -> tuple[int, ...]:
        """Cheapest first; who recovers enough by none has the last."""
        return (0, SPECIAL, FREQUENT, SPECIAL | FREQUENT) if self.special_ids else (0, FREQUENT)

    def chosen(
        self, mass: Tensor, within: Callable[[int], Tensor], special: Tensor | None, heavy: int, recent: int
    ) -> Tensor:
        """The policy of each KV head for a prompt: uint8 `[kv_heads]`.

        A row's local tokens are so many back from it; the others that a policy keeps are the same for all rows.

        Args:
            mass: float32 `[kv_heads, T]`, of the prompt's rows.
            within: the part of it that each row gave to so many newest tokens, itself among them.
            special: bool `[T]`.
            heavy, recent: the budget.
        """
        total = mass.shape[1]
        older = torch.arange(total, device=mass.device) < total - recent
        pinned = torch.zeros_like(older) if special is None else special & older
        pinned &= pinned.cumsum(0) <= heavy
        count = int(pinned.sum()) if special is not None else 0

        def recovered(policy: int) -> Tensor:
            left = heavy - count * bool(policy & SPECIAL)
            kept = (pinned if policy & SPECIAL else torch.zeros_like(pinned)).expand_as(mass)
            window = recent if policy & FREQUENT else recent + left
            if policy & FREQUENT:
                others = mass.masked_fill(kept | ~older, -1)
                kept = kept.scatter(1, top_k(others[None], min(left, others.shape[1]))[0], True)
            near = within(window) if window else torch.zeros_like(mass)
            return (near + (mass - near) * kept).sum(-1) / mass.sum(-1).clamp(min=torch.finfo(mass.dtype).tiny)

        *cheaper, last = self.policies
        chosen = torch.full(mass.shape[:1], last, dtype=torch.uint8, device=mass.device)
        for policy in reversed(cheaper):
            chosen = chosen.masked_fill(recovered(policy) >= self.recovery, policy)
        return chosen

    def weighed(
        self, policies: Tensor, held: Tensor, new: Tensor, positions: Tensor, special: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What a forward adds to the weights of held tokens, and the weights of new ones at `positions`.

        `policies [rows, kv_heads]`; attention `held [rows, kv_heads, slots]` and `new [rows, kv_heads, n]`; `positions` int64 and
        `special` bool `[rows, 1, n]`.
        """
        frequent, pins = ((policies & policy > 0)[..., None] for policy in (FREQUENT, SPECIAL))
        new = torch.where(frequent, new, positions.to(new.dtype))
        if special is not None:
            new = new.masked_fill(pins & special, PINNED)
        return held * frequent, new
