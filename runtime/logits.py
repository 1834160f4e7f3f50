"""How a model turns products of queries and keys into logits."""

from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logits:
    """How a model turns q.k into logits: times `scale`, then an optional soft cap; `sliding` is the window in tokens, if any."""

    scale: float
    softcap: float | None = None
    sliding: int | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """`scores`, already scaled, with the soft cap applied."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


def masked(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """`scores [rows, kv_heads, query rows, tokens]` with -inf where `hidden [rows, 1 or kv_heads, n or 1, tokens]` bool is True.

    The query rows of a KV head are group-major (G groups of n queries), and all groups share the mask.
    """
    if hidden is None:
        return scores
    by_group = scores.unflatten(2, (-1, hidden.shape[2])) if hidden.shape[2] > 1 else scores.unsqueeze(3)
    return by_group.masked_fill(hidden.unsqueeze(2), -torch.inf).flatten(2, 3)


def either(*hidden: Tensor | None) -> Tensor | None:
    """The union of masks, each bool or None; None where all are None."""
    masks = [mask for mask in hidden if mask is not None]
    return reduce(or_, masks) if masks else None
