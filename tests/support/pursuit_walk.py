"""A float64 pursuit that follows the atoms chosen by the code under test, and vectors and dictionaries to test pursuits on.

The choice of an atom is discontinuous: if two atoms are equally good in float32, either may be chosen. So this pursuit takes the
given choice, reports by how much the best atom was better, and continues from the given one in float64.
"""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from calib.kernels.matching_pursuit.reference import RUN

# (vectors, width, atoms, sparsity): 1 of each, atoms that are no multiple of RUN, more steps than atoms or channels.
SHAPES = [(1, 1, 1, 1), (1, 8, 5, 3), (7, 3, 2, 16), (33, 16, RUN, 8), (50, 24, RUN + 1, 16), (40, 32, 300, 16)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unit(x: Tensor) -> Tensor:
    """Rows of norm 1, rounded to float16 as in a stored dictionary, so that |d| is 1 to within 2^-11."""
    return torch.nn.functional.normalize(x, dim=-1).half().float()


def normal(vectors: int, width: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return randn(vectors, width, seed=seed), unit(randn(count, width, seed=seed + 1))


def clustered(vectors: int, width: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors around 24 centres, with lengths that grow 200-fold; atoms are other points of the same clusters."""
    centres = 2 * randn(24, width, seed=seed)
    whole = centres.repeat(-(-(vectors + count) // 24), 1)[: vectors + count]
    whole = whole + randn(*whole.shape, seed=seed + 1)
    return whole[:vectors] * torch.linspace(0.1, 20, vectors)[:, None], unit(whole[vectors:])


def tied(vectors: int, width: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors for which two atoms are equally good up to rounding; a part of norm 1/2 is orthogonal to both."""
    atoms = unit(randn(count, width, seed=seed))
    two = torch.stack([atoms[torch.arange(start, start + vectors) % count].double() for start in (0, 7)], 1)
    products = two @ two.mT
    own, other, inner = products[:, 0, 0], products[:, 1, 1], products[:, 0, 1]
    share = (own - inner) / (other - inner)  # x = first + share * second: x . first = x . second
    rest = randn(vectors, width, seed=seed + 1).double()
    rest = rest - (torch.linalg.pinv(two) @ (two @ rest[..., None]))[..., 0]
    x = two[:, 0] + share[:, None] * two[:, 1] + 0.5 * torch.nn.functional.normalize(rest, dim=-1)
    return x.float(), atoms


def walk(
    x: Tensor, atoms: Tensor, index: Tensor, orthogonal: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run a float64 pursuit of `x [V, D]` with the chosen atoms `index [V, s]`; `orthogonal`: with least squares in every step.

    Returns three arrays: `[V, s]`, by how much the largest |correlation| exceeded that of the chosen atom; `[V, s]`, the
    coefficients after the last step; `[V, s + 1]`, the norm of the residual before the first step and after each.
    """
    short, coefficients, left = (np.zeros((*index.shape[:1], index.shape[1] + more)) for more in (0, 0, 1))
    dictionary = atoms.double().numpy()
    for row, vector in enumerate(x.double().numpy()):
        residual = vector.copy()
        left[row, 0] = np.linalg.norm(residual)
        for step, position in enumerate(index[row].tolist()):
            correlations = dictionary @ residual
            short[row, step] = abs(correlations).max() - abs(correlations[position])
            if orthogonal:
                chosen = dictionary[index[row, : step + 1].numpy()]
                fit = np.linalg.lstsq(chosen.T, vector, rcond=None)[0]
                coefficients[row, : step + 1] = fit
                residual = vector - fit @ chosen
            else:
                coefficients[row, step] = correlations[position]
                residual = residual - correlations[position] * dictionary[position]
            left[row, step + 1] = np.linalg.norm(residual)
    return short, coefficients, left


def lengths_left(x: Tensor, atoms: Tensor, index: Tensor, coefficient: Tensor) -> np.ndarray:
    """|x - x^| with the first 0, 1, ... s pairs, float64 `[V, s + 1]`."""
    parts = coefficient.double()[..., None] * atoms.double()[index]
    return np.concatenate(
        [x.double().norm(dim=-1)[:, None], (x.double()[:, None] - parts.cumsum(1)).norm(dim=-1)], axis=1
    )


@st.composite
def problems(draw: Any) -> tuple[Tensor, Tensor, int]:
    """Draw (vectors, atoms, sparsity): odd shapes; repeated, negated, nearly equal or zero atoms; zero, tiny or large vectors, or
    multiples of an atom."""
    vectors, width, count = draw(st.integers(1, 9)), draw(st.integers(1, 17)), draw(st.integers(1, 140))
    x, atoms = normal(vectors, width, count, seed=draw(st.integers(0, 2**20)))
    for kind in draw(st.lists(st.sampled_from(["repeat", "negate", "near", "zero", "all zero"]), max_size=3)):
        half = (count + 1) // 2
        if kind == "all zero":
            atoms = torch.zeros_like(atoms)
        elif kind == "zero":
            atoms[::2] = 0
        else:
            source = atoms[: count - half] * (-1 if kind == "negate" else 1)
            atoms[half:] = source if kind != "near" else (source + 1e-3 * randn(*source.shape)).half().float()
    x = x * draw(st.sampled_from([1e-3, 1.0, 1e4]))
    if draw(st.booleans()):
        x[0] = draw(st.sampled_from([torch.zeros(width), -3 * atoms[-1]]))
    return x, atoms, draw(st.integers(1, 16))
