"""FastGen: every KV head keeps tokens by the cheapest policy that recovers enough of the prompt's attention (arXiv:2310.01801)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.heavy_hitters.operation import MassRule
from calib.kernels.top_k.operation import top_k
from calib.runtime.stages.selection import Saliency

# A policy is what a head keeps besides its newest tokens: special ones, those with the most attention, or both.
SPECIAL, FREQUENT = 1, 2
PINNED = 2.0**31  # the weight of a special token: above any attention mass or position, and the largest in a file


@dataclass(frozen=True)
class FastGen(Saliency):
    """A token's weight is its attention mass, or its position in a head whose policy has no frequency, or `PINNED` if special.

    The policies, cheapest first, are locality, special tokens + locality, frequency + locality, and all three. All heads of a layer
    hold the same number of tokens, so a policy decides which tokens a head keeps, not how many: the newest tokens fill what special
    and frequent tokens leave of the budget.

    Args:
        recovery: share of the prompt's attention that the tokens of a policy must have got, in (0, 1] (section 3.2, T).
        special_ids: special tokens and punctuation; without any, the policies with special tokens are left out.
    """

    recovery: float
    special_ids: tuple[int, ...] = ()

    by_budget = True
    rule = MassRule(limit=PINNED)  # pinned weights do not grow, so that the earlier of special tokens stay

    @property
    def policies(self) -> tuple[int, ...]:
        """The policies, cheapest first; a head for which none recovers enough has the last."""
        return (0, SPECIAL, FREQUENT, SPECIAL | FREQUENT) if self.special_ids else (0, FREQUENT)

    def chosen(
        self, mass: Tensor, within: Callable[[int], Tensor], special: Tensor | None, heavy: int, recent: int
    ) -> Tensor:
        """The policy of each KV head for a prompt: uint8 `[kv_heads]`.

        Local tokens are counted back from each query row; the other tokens that a policy keeps are the same for all rows.

        Args:
            mass: float32 `[kv_heads, T]`, the attention that each token got from the prompt's rows.
            within: gives for n the part of `mass` that comes from rows for which the token is among the n newest.
            special: bool `[T]`, which tokens are special; None: there are none.
            heavy, recent: the budget, as numbers of tokens.
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
        """What a forward adds to the weights of the tokens that are held, and the weights of the new ones.

        `policies [rows, kv_heads]`; attention `held [rows, kv_heads, slots]` and `new [rows, kv_heads, n]`; `positions` int64 and
        `special` bool `[rows, 1, n]`.
        """
        frequent, pins = ((policies & policy > 0)[..., None] for policy in (FREQUENT, SPECIAL))
        new = torch.where(frequent, new, positions.to(new.dtype))
        if special is not None:
            new = new.masked_fill(pins & special, PINNED)
        return held * frequent, new
