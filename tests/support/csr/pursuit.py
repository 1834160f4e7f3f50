"""Matching pursuit in float64, plain and orthogonal, and all that float32 may make of a near-tie (arXiv:2412.11741, eq. 2-3).

Atoms are rows, `[N, d]`. A choice is discontinuous: where two correlations are nearly equal float32 may take the other one,
and everything after it is different. `readings` follows every such choice.
"""

from collections.abc import Iterator

import numpy as np

# What float32 may be wrong between two correlations R.d, relative to |x|. A product of 64 terms is rounded to sqrt(64) / 2 units
# of 2^-24 of |R| |d| as a random walk; the rotation of a key to two units, every subtraction to half of one, and so is every
# step of the Gram form. With what is left of the first steps that is 2^-22 for each of the two.
DOUBT = 2.0**-21

# x^ and what is stored of it agree within this, relative to |x|: 16 coefficients, each wrong by DOUBT in its own direction, are
# 4 DOUBT; times two. Nine in ten of the vectors that float32 encodes are within a tenth of it (tests/csr/test_oracle.py); a
# coefficient of |x| / 8 that is half a unit of float16 off is 8 times beyond it.
REACH = 2.0**-18

ZERO = 1e-10  # relative to |x|: a direction that is not there
DEPENDENT = 2.0**-10  # relative to an atom: what is less beside others is the rounding of its float16 entries
PATHS = 1000  # near-ties of near-ties that are followed


def pursue(x: np.ndarray, atoms: np.ndarray, steps: int, orthogonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """`x [V, d]`, `atoms [N, d]` -> index, coefficient `[V, steps]`; of equal correlations the first."""
    index, coefficient = np.zeros((len(x), steps), dtype=int), np.zeros((len(x), steps))
    residual, rows = x.copy(), np.arange(len(x))
    for step in range(steps):
        correlation = residual @ atoms.T
        index[:, step] = abs(correlation).argmax(1)
        coefficient[:, step] = correlation[rows, index[:, step]]
        if orthogonal:
            chosen = atoms[index[:, : step + 1]]
            coefficient[:, : step + 1] = fitted(x, chosen)
            residual = x - np.einsum("vs,vsd->vd", coefficient[:, : step + 1], chosen)
        else:
            residual = residual - coefficient[:, step : step + 1] * atoms[index[:, step]]
    return index, coefficient


def fitted(x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Least squares: `x [V, d]`, `chosen [V, g, d]` -> coefficients `[V, g]`, 0 for an atom that those before it span."""
    return np.einsum("vdg,vd->vg", np.linalg.pinv(chosen * independent(chosen)[..., None], rcond=ZERO), x)


def independent(chosen: np.ndarray) -> np.ndarray:
    """`[V, g]`: atoms of which more is left beside those before them than the rounding of their float16 entries."""
    found, bases = np.zeros(chosen.shape[:2], dtype=bool), np.zeros(chosen.shape)
    for number in range(chosen.shape[1]):
        rest = chosen[:, number]
        for _ in range(2):
            rest = rest - np.einsum("vg,vgd->vd", np.einsum("vgd,vd->vg", bases, rest), bases)
        size = np.linalg.norm(rest, axis=1)
        found[:, number] = size > DEPENDENT * np.linalg.norm(chosen[:, number], axis=1)
        bases[:, number] = rest * (found[:, number] / np.where(size > 0, size, 1))[:, None]
    return found


def rebuilt(index: np.ndarray, coefficient: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """`[V, s]` pairs -> `[V, d]`; pairs of one index add up."""
    return np.einsum("vs,vsd->vd", coefficient, atoms[index])


def lead(x: np.ndarray, atoms: np.ndarray, steps: int, orthogonal: bool) -> np.ndarray:
    """`[V]`: the least distance, relative to |x|, between a correlation that was chosen and the largest that was not."""
    index, coefficient = pursue(x, atoms, steps, orthogonal)
    size, least, rows = np.linalg.norm(x, axis=1), np.full(len(x), np.inf), np.arange(len(x))
    for step in range(steps):
        part = coefficient[:, :step] if not orthogonal else fitted(x, atoms[index[:, :step]])
        correlation = abs((x - rebuilt(index[:, :step], part, atoms)) @ atoms.T)
        best = correlation[rows, index[:, step]]
        correlation[rows, index[:, step]] = -np.inf
        least = np.minimum(least, (best - correlation.max(1)) / np.where(size > 0, size, 1))
    return least


def readings(
    x: np.ndarray, atoms: np.ndarray, steps: int, orthogonal: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Every (index, coefficient, error of a coefficient) that float32 may come to for one `x [d]`, the exact one first.

    A path ends early where what is left of x is less than what is looked at.
    """
    size, paths = float(np.linalg.norm(x)), 0
    pending: list[tuple[list[int], np.ndarray]] = [([], np.zeros(0))]
    while pending and paths < PATHS:
        index, coefficient = pending.pop()
        residual = x - coefficient @ atoms[index] if index else x
        if len(index) == steps or 4 * np.linalg.norm(residual) <= REACH * size:
            least = smallest(atoms[index]) if orthogonal and index else 1
            paths += 1
            yield np.array(index, dtype=int), coefficient, DOUBT * size / max(least, 1e-3)
            continue
        correlation = atoms @ residual
        best = abs(correlation).max()
        near = np.flatnonzero(abs(correlation) >= best - DOUBT * size)
        for atom in near[
            np.lexsort((-near, abs(correlation[near])))
        ]:  # the best, the first of equals, is taken up first
            chosen = [*index, int(atom)]
            if orthogonal:
                pending.append((chosen, fitted(x[None], atoms[chosen][None])[0]))
            else:
                pending.append((chosen, np.append(coefficient, correlation[atom])))


def smallest(chosen: np.ndarray) -> float:
    """The least singular value of those of `chosen [g, d]` that do not depend on each other: it divides errors of a fit."""
    return float(np.linalg.svd(chosen[independent(chosen[None])[0]], compute_uv=False).min(initial=1))
