"""Orthogonal matching pursuit: coefficients are the least squares over any chosen atoms, and the error is below plain pursuit's.

Choices and residuals are compared with float64 in test_matching_pursuit.py, together with the other forms.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from law_examples import examples
from pursuit_walk import SHAPES, clustered, lengths_left, normal, problems, randn, unit, walk
from tolerances import FLOAT32_FOLD
from torch import Tensor

from calib.kernels.matching_pursuit.reference import (
    DEPENDENT,
    desparsify,
    matching_pursuit,
    orthogonal_matching_pursuit,
)

pytestmark = pytest.mark.arithmetic


def relative_error(x: Tensor, atoms: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Mean of |x - x^|^2 / |x|^2."""
    return ((x - desparsify(*pairs, atoms)).square().sum(-1) / x.square().sum(-1)).mean()


def spread(x: Tensor, coefficient: Tensor) -> np.ndarray:
    """Bound of the rounding error of x^, from the norms of x and of the coefficients: terms cancel where atoms nearly coincide."""
    return FLOAT32_FOLD * (x.double().norm(dim=-1) + coefficient.double().norm(dim=-1)).numpy()


@pytest.mark.full
@settings(max_examples=examples(100), deadline=None)
@given(problems())
def test_what_is_left_never_grows_from_step_to_step(problem):
    """Compares calls with one step, two steps and so on, since each step changes the earlier coefficients."""
    x, atoms, sparsity = problem
    before = x.double().norm(dim=-1).numpy()
    for fewer in range(1, sparsity + 1):
        index, coefficient = orthogonal_matching_pursuit(x, atoms, fewer)
        left = lengths_left(x, atoms, index, coefficient)[:, -1]
        assert (left <= before + spread(x, coefficient)).all()
        before = left


@pytest.mark.parametrize("made", [normal, clustered])
@pytest.mark.parametrize(("vectors", "width", "count", "sparsity"), SHAPES)
def test_what_is_left_is_orthogonal_to_every_chosen_atom(vectors, width, count, sparsity, made):
    x, atoms = made(vectors, width, count)
    index, coefficient = orthogonal_matching_pursuit(x, atoms, sparsity)
    residual = x.double() - (coefficient.double()[..., None] * atoms.double()[index]).sum(1)
    products = (atoms.double()[index] @ residual[..., None])[..., 0].abs().numpy()
    assert (products <= spread(x, coefficient)[:, None]).all()


def test_coefficients_are_those_of_least_squares():
    x, atoms = normal(100, 32, 200)
    index, coefficient = orthogonal_matching_pursuit(x, atoms, 8)
    _, expected, _ = walk(x, atoms, index, orthogonal=True)
    np.testing.assert_allclose(coefficient, expected, rtol=0, atol=FLOAT32_FOLD * float(x.norm(dim=-1).max()))


def test_atoms_in_a_narrow_cone_still_give_the_least_error():
    """Eight of twelve atoms that differ by thousandths, so coefficients are in the thousands. A single pass of Gram-Schmidt would
    miss the least error by 1e-3."""
    atoms, x = unit(unit(randn(1, 16)) + 1e-3 * randn(12, 16, seed=1)), randn(300, 16, seed=2)
    index, coefficient = orthogonal_matching_pursuit(x, atoms, 8)
    assert coefficient.abs().max() > 1000
    _, _, least = walk(x, atoms, index, orthogonal=True)
    left = lengths_left(x, atoms, index, coefficient)
    assert (left[:, -1] <= least[:, -1] + FLOAT32_FOLD * least[:, 0]).all()


@pytest.mark.parametrize("made", [normal, clustered])
@pytest.mark.parametrize(("sparsity", "most"), [(4, 1.0), (8, 0.98), (16, 0.9)])
def test_an_orthogonal_pursuit_errs_less_on_average(made, sparsity, most):
    """The mean relative squared error is at most this share of matching pursuit's; figures are in the README."""
    for seed in range(3):
        x, atoms = made(500, 64, 512, seed=10 * seed)
        plain, refitted = (
            relative_error(x, atoms, pursuit(x, atoms, sparsity))
            for pursuit in (matching_pursuit, orthogonal_matching_pursuit)
        )
        assert 0 < refitted < most * plain


def test_atoms_that_say_nothing_new_get_nothing():
    """Atoms that are zero, copies, or copies up to float16's rounding get the coefficient 0: they are not divided by their tiny
    part outside the span of the others."""
    one, other = unit(randn(2, 16))
    rounded = one * (1 + DEPENDENT / 4 * torch.tensor([1.0, -1.0] * 8))
    x = torch.stack([3 * one + other, torch.zeros(16), 1e-20 * one, one])
    for atoms in (torch.stack([one, one, torch.zeros(16)]), torch.zeros(5, 16), torch.stack([one, rounded])):
        index, coefficient = orthogonal_matching_pursuit(x, atoms, 6)
        assert bool(coefficient.isfinite().all()) and float(coefficient.abs().max()) < 10
        assert int((coefficient != 0).sum(1).max()) <= 1
        assert coefficient[1].tolist() == [0] * 6
        left = lengths_left(x, atoms, index, coefficient)
        assert (left[:, -1] <= left[:, 0]).all()
