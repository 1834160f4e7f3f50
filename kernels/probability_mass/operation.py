"""How much probability tokens got, by whichever form of the operation the device runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.probability_mass import reference
from calib.kernels.probability_mass.reference import ScoredTokens

__all__ = ["ScoredTokens", "add_mass_by_position", "mass_by_position", "probability_mass"]


def probability_mass(spans: Sequence[ScoredTokens], normaliser: Tensor) -> list[Tensor]:
    """Of each span the sum of its tokens' probabilities exp(score - normaliser) over the query rows of a KV head: float32 `[rows,
    kv_heads, n]`. `normaliser [rows, kv_heads, R, 1]` float32: the log-sum-exp of each query row over all spans of its softmax.
    """
    if prefers_triton(normaliser.device) and all(reference.is_served(span) for span in spans):
        from calib.kernels.probability_mass import triton

        return triton.probability_mass(spans, normaliser)
    return reference.probability_mass(spans, normaliser)


def mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, reach: int) -> Tensor:
    """The same of all spans together, by the tokens' positions: float32 `[rows, kv_heads, reach]`, anything where no query row met
    a token. Of a position there is one token at most that is not hidden from all, and it lies before `reach`."""
    if prefers_triton(normaliser.device) and all(reference.is_served(span) for span in spans):
        from calib.kernels.probability_mass import triton

        return triton.mass_by_position(spans, normaliser, reach)
    return reference.mass_by_position(spans, normaliser, reach)


def add_mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, mass: Tensor) -> None:
    """Adds each token's sum to `mass [rows, kv_heads, reach]` float32, which may be a view, at its position; those that are hidden
    from all and those whose position is negative or not below `reach` add nothing. Of a position there is one other at most."""
    fits = mass.dtype == torch.float32 and (mass.stride(2) == 1 or mass.shape[2] <= 1)
    if prefers_triton(normaliser.device) and fits and all(reference.is_served(span) for span in spans):
        from calib.kernels.probability_mass import triton

        triton.add_mass_by_position(spans, normaliser, mass)
    else:
        reference.add_mass_by_position(spans, normaliser, mass)
