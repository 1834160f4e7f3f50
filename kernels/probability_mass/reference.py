"""How much probability the tokens of some spans got from the query rows, in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredTokens:
    """A span of tokens that query rows were scored against.

    Args:
        scores: float32 `[rows, kv_heads, R, n]`, -inf where hidden. Its rows R are group-major, then the columns.
        weights: float32 `[rows, columns, n or 1]`, what a column's probabilities count; None: 1.
    """

    scores: Tensor
    weights: Tensor | None = None


def probability_mass(spans: Sequence[ScoredTokens], normaliser: Tensor) -> list[Tensor]:
    """See `operation.probability_mass`."""
    found = []
    for span in spans:
        shares = (span.scores - normaliser).exp_()
        if span.weights is not None:
            columns = span.weights.shape[1]
            shares = shares.unflatten(2, (-1, columns)).mul_(span.weights[:, None, None]).flatten(2, 3)
        found.append(shares.sum(2))
    return found


def is_served(span: ScoredTokens) -> bool:
    """Whether a kernel reads it: numbers of a query row side by side."""
    return span.scores.dtype == torch.float32 and (span.scores.stride(3) == 1 or span.scores.shape[3] <= 1)
