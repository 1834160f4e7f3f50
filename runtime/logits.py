"""How a model turns products of queries and keys into logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logits:
    """How a model turns q.k into logits: `scale`, then a soft cap, and a sliding window of that many tokens."""

    scale: float
    softcap: float | None = None
    sliding: int | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """The soft cap on already scaled `scores`."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap
