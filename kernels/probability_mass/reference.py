"""Attention probability that the tokens of some spans receive, summed over query rows, in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredTokens:
    """A span of tokens with their attention scores.

    Args:
        scores: float32 `[rows, kv_heads, R, n]`, -inf where hidden. The R query rows are group-major, columns change fastest.
        weights: weights of the probabilities of each query column, float32 or uint8 `[rows, columns, n or 1]`; None: 1.
        positions: positions for `mass_by_position` and `add_mass_by_position`, int32 or int64 `[rows, kv_heads or 1, n]`, any
            number for tokens that are hidden from every query row; or the position of the first token, if tokens are consecutive.
    """

    scores: Tensor
    weights: Tensor | None = None
    positions: Tensor | int | None = None


def probability_mass(spans: Sequence[ScoredTokens], normaliser: Tensor) -> list[Tensor]:
    """As `operation.probability_mass`."""
    found = []
    for span in spans:
        shares = (span.scores - normaliser).exp_()
        if span.weights is not None:
            columns = span.weights.shape[1]
            shares = shares.unflatten(2, (-1, columns)).mul_(span.weights[:, None, None]).flatten(2, 3)
        found.append(shares.sum(2))
    return found


def mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, reach: int) -> Tensor:
    """As `operation.mass_by_position`; 0 at positions without a token."""
    found = normaliser.new_zeros(*normaliser.shape[:2], reach)
    for span, given in zip(spans, probability_mass(spans, normaliser), strict=True):
        found.scatter_add_(-1, _positions(span).clamp(0, reach - 1).expand_as(given), given)
    return found


def add_mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, mass: Tensor) -> None:
    """As `operation.add_mass_by_position`."""
    reach = mass.shape[2]
    for span, given in zip(spans, probability_mass(spans, normaliser), strict=True):
        positions = _positions(span)
        outside = (positions < 0) | (positions >= reach) | (span.scores == -torch.inf).all(2)
        mass.scatter_add_(-1, positions.clamp(0, reach - 1).expand_as(given), given.masked_fill(outside, 0))


def _positions(span: ScoredTokens) -> Tensor:
    """Positions of a span's tokens, int64 `[rows or 1, kv_heads or 1, n]`."""
    positions = span.positions
    assert positions is not None
    if isinstance(positions, int):
        return positions + torch.arange(span.scores.shape[3], device=span.scores.device).expand(1, 1, -1)
    return positions.long()


def is_served(span: ScoredTokens) -> bool:
    """Whether the kernel supports this span: float32 scores, contiguous along tokens."""
    numbers = [part for part in (span.scores, span.positions) if isinstance(part, Tensor)]
    return span.scores.dtype == torch.float32 and all(part.stride(-1) == 1 or part.shape[-1] <= 1 for part in numbers)
