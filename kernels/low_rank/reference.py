"""Low-rank factors of a matrix by power iteration, and attention with factors alone (GEAR, arXiv:2403.05527, eq. 6, App. A).

R ~ A B^T with B `[D, r]` orthonormal and A = R B `[T, r]`: a token's coefficients are the projection of its own residual on a basis
that the segment shares, so that a basis known beforehand can be used as well. A tile, tokens last, may have S segments of equal
length n: basis `[..., r D, S]`, coefficients `[..., r, T]`, T = S n.
"""

import torch
from torch import Tensor

NARROW = 192  # most channels with which forming R^T R is assumed to cost less than a few rounds of thin products


def power_iteration(residual: Tensor, start: Tensor, loops: int) -> Tensor:
    """Approximate the r leading right singular vectors of `residual [..., T, D]`: orthonormal `[..., D, r]`.

    Power iteration from `start [..., D, r]`: every loop multiplies by R^T R and orthonormalises. If the rank is below r, the other
    vectors are arbitrary.
    """
    lead, (tokens, width) = residual.shape[:-2], residual.shape[-2:]
    # One batch axis, so that a product is one operation: there are many loops, and the matrices of a block are small.
    rows, basis = residual.reshape(-1, tokens, width), start.expand(*lead, -1, -1).reshape(-1, width, start.shape[-1])
    columns = rows.mT
    # Thin products read R twice in every loop; R^T R, if it is small, is formed once and used in all loops.
    moments = torch.bmm(columns, rows) if tokens > width and width <= NARROW else None
    for _ in range(loops):
        product = torch.bmm(columns, torch.bmm(rows, basis)) if moments is None else torch.bmm(moments, basis)
        basis = torch.linalg.qr(product).Q
    return basis.view(*lead, *basis.shape[1:])


def low_rank_scores(query: Tensor, basis: Tensor, coefficients: Tensor) -> Tensor:
    """Scores (q B) A^T, without forming B A^T: `query [..., rows, D]` float32 -> `[..., rows, T]`."""
    rank, channels, segments = coefficients.shape[-2], query.shape[-1], basis.shape[-1]
    bases = basis.float().unflatten(-2, (rank, channels)).movedim(-1, -3)  # [..., S, r, D]
    shared = query.unsqueeze(-3) @ bases.mT  # [..., S, rows, r]
    parts = coefficients.float().unflatten(-1, (segments, -1)).movedim(-2, -3)  # [..., S, r, n]
    return (shared @ parts).movedim(-3, -2).flatten(-2)


def low_rank_mix(weights: Tensor, basis: Tensor, coefficients: Tensor, channels: int) -> Tensor:
    """Mixture (p A) B^T, without forming A B^T: `weights [..., rows, T]` float32 -> `[..., rows, D]`."""
    rank, segments = coefficients.shape[-2], basis.shape[-1]
    bases = basis.float().unflatten(-2, (rank, channels)).movedim(-1, -3)  # [..., S, r, D]
    parts = coefficients.float().unflatten(-1, (segments, -1)).movedim(-2, -3)  # [..., S, r, n]
    shared = weights.unflatten(-1, (segments, -1)).movedim(-2, -3) @ parts.mT  # [..., S, rows, r]
    return shared.movedim(-3, -2).flatten(-2) @ bases.flatten(-3, -2)
