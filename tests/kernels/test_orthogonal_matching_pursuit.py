"""Orthogonal matching pursuit: least squares over the chosen atoms, whatever they are, and less error than plain pursuit.

That its choices and what is left are those of float64 is tested with the other forms, in test_matching_pursuit.py.
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
    """Rounding of x^ relative to its terms, which cancel where atoms nearly coincide."""
    return FLOAT32_FOLD * (x.double().norm(dim=-1) + coefficient.double().norm(dim=-1)).numpy()


@pytest.mark.full
@settings(max_examples=examples(100), deadline=None)
@given(problems())
def test_what_is_left_never_grows_from_step_to_step(problem):
    """Of calls with one step, two, ...: the pairs so far are not an earlier answer."""
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
    """Eight of twelve atoms that differ by thousandths, coefficients of thousands: one pass of Gram-Schmidt misses by 1e-3."""
    atoms, x = unit(unit(randn(1, 16)) + 1e-3 * randn(12, 16, seed=1)), randn(300, 16, seed=2)
    index, coefficient = orthogonal_matching_pursuit(x, atoms, 8)
    assert coefficient.abs().max() > 1000
    _, _, least = walk(x, atoms, index, orthogonal=True)
    left = lengths_left(x, atoms, index, coefficient)
    assert (left[:, -1] <= least[:, -1] + FLOAT32_FOLD * least[:, 0]).all()


@pytest.mark.parametrize("made", [normal, clustered])
@pytest.mark.parametrize(("sparsity", "most"), [(4, 1.0), (8, 0.98), (16, 0.9)])
def test_an_orthogonal_pursuit_errs_less_on_average(made, sparsity, most):
    """Its mean relative squared error over matching pursuit's; the README has the figures."""
    for seed in range(3):
        x, atoms = made(500, 64, 512, seed=10 * seed)
        plain, refitted = (
            relative_error(x, atoms, pursuit(x, atoms, sparsity))
            for pursuit in (matching_pursuit, orthogonal_matching_pursuit)
        )
        assert 0 < refitted < most * plain


def test_atoms_that_say_nothing_new_get_nothing():
    """Copies, zeros, and copies that differ by float16's rounding: no division by what is left of them."""
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
