"""Attention probability that tokens receive, summed over query rows, by the implementation for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.probability_mass import reference
from calib.kernels.probability_mass.reference import ScoredTokens

__all__ = ["ScoredTokens", "add_mass_by_position", "mass_by_position", "probability_mass"]


def probability_mass(spans: Sequence[ScoredTokens], normaliser: Tensor) -> list[Tensor]:
    """Sums the probabilities exp(score - normaliser) of each token over the query rows of a KV head: for each span float32 `[rows,
    kv_heads, n]`. `normaliser [rows, kv_heads, R, 1]`, float32, is the log-sum-exp of each query row over the whole softmax.
    """
    if prefers_triton(normaliser.device) and all(reference.is_served(span) for span in spans):
        from calib.kernels.probability_mass import triton

        return triton.probability_mass(spans, normaliser)
    return reference.probability_mass(spans, normaliser)


def mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, reach: int) -> Tensor:
    """As `probability_mass`, for all spans in one tensor by the tokens' positions: float32 `[rows, kv_heads, reach]`, undefined at
    positions without a visible token. Each position may occur in one token at most that is not hidden from all query rows, and
    must be below `reach`."""
    if prefers_triton(normaliser.device) and all(reference.is_served(span) for span in spans):
        from calib.kernels.probability_mass import triton

        return triton.mass_by_position(spans, normaliser, reach)
    return reference.mass_by_position(spans, normaliser, reach)


def add_mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, mass: Tensor) -> None:
    """Adds each token's sum to `mass [rows, kv_heads, reach]`, float32, which may be a view, at the token's position. Tokens that
    are hidden from all query rows, and those whose position is negative or not below `reach`, add nothing. No two of the other
    tokens may have the same position."""
    fits = mass.dtype == torch.float32 and (mass.stride(2) == 1 or mass.shape[2] <= 1)
    if prefers_triton(normaliser.device) and fits and all(reference.is_served(span) for span in spans):
        from calib.kernels.probability_mass import triton

        triton.add_mass_by_position(spans, normaliser, mass)
    else:
        reference.add_mass_by_position(spans, normaliser, mass)
