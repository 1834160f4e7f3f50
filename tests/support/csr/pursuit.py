"""Matching pursuit in float64, plain and orthogonal (arXiv:2412.11741, eq. 2-3), and all results that float32 may give at
near-ties.

Atoms are rows, `[N, d]`; V is vectors, s steps. The choice of an atom is discontinuous: if two correlations are nearly equal,
float32 may choose the other atom, and all later steps differ. `readings` follows every such choice.
"""

from collections.abc import Iterator

import numpy as np

# Error of the difference of two correlations R.d in float32, relative to |x|. A product of 64 terms has an error of sqrt(64) / 2
# units of 2^-24 of |R| |d| as a random walk; the rotation of a key adds two units, every subtraction half a unit, and so does every
# step of the Gram form. With the errors of the first steps that is 2^-22 for each of the two.
DOUBT = 2.0**-21

# Tolerance of a stored x^, relative to |x|: 16 coefficients, each wrong by DOUBT in its own direction, are 4 DOUBT; times two. Nine
# in ten vectors encoded in float32 are within a tenth of it (tests/csr/test_oracle.py); an error of half a float16 unit in a
# coefficient of |x| / 8 is 8 times the tolerance.
REACH = 2.0**-18

ZERO = 1e-10  # singular values below it, relative to the largest, count as 0
DEPENDENT = 2.0**-10  # an atom's part orthogonal to others is 0 below this share: rounding to float16
PATHS = 1000  # most results of near-ties that are followed


def pursue(x: np.ndarray, atoms: np.ndarray, steps: int, orthogonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pursue `x [V, d]` with `atoms [N, d]`: index and coefficient, `[V, steps]` each; of equal correlations, the first atom."""
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
    """Least-squares coefficients `[V, g]` of `x [V, d]` by `chosen [V, g, d]`; 0 for an atom in the span of those before it."""
    return np.einsum("vdg,vd->vg", np.linalg.pinv(chosen * independent(chosen)[..., None], rcond=ZERO), x)


def independent(chosen: np.ndarray) -> np.ndarray:
    """Bool `[V, g]`: atoms whose part orthogonal to those before them exceeds the rounding of their float16 entries."""
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
    """The sums `[V, d]` of pairs `[V, s]`; an index may occur twice."""
    return np.einsum("vs,vsd->vd", coefficient, atoms[index])


def lead(x: np.ndarray, atoms: np.ndarray, steps: int, orthogonal: bool) -> np.ndarray:
    """`[V]`: the least margin of a step: the chosen |correlation| minus the largest other one, relative to |x|."""
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
    """Every (index, coefficient, error of a coefficient) that float32 may give for one `x [d]`, the exact one first.

    A pursuit ends early when its residual is at most a quarter of the tolerance.
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
        ]:  # the best atom, of equals the first, is last in `pending` and so followed first
            chosen = [*index, int(atom)]
            if orthogonal:
                pending.append((chosen, fitted(x[None], atoms[chosen][None])[0]))
            else:
                pending.append((chosen, np.append(coefficient, correlation[atom])))


def smallest(chosen: np.ndarray) -> float:
    """The least singular value of the independent atoms of `chosen [g, d]`, by which errors of a least-squares fit grow."""
    return float(np.linalg.svd(chosen[independent(chosen[None])[0]], compute_uv=False).min(initial=1))
