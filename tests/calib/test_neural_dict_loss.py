"""The two terms of CSR's loss of a dictionary against plain formulas, their gradients against autograd's; beta (eq. 11)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples

from calib.kernels.matching_pursuit.reference import matching_pursuit
from calib.neural_dict.centroids import centroids, unit_rows
from calib.neural_dict.loss import diversity, diversity_weight, reconstruction, scattered

pytestmark = pytest.mark.arithmetic

SIZES = [(1, 1, 1, 1), (7, 5, 3, 2), (64, 200, 16, 8), (33, 12, 40, 4)]  # vectors, atoms, channels, pairs


def plain_diversity(atoms):
    """Eq. 10 as printed, N x N."""
    count = len(atoms)
    return (torch.eye(count, dtype=atoms.dtype) - atoms @ atoms.T).square().sum() / count**2


def plain_reconstruction(atoms, x, index, coefficient):
    """Eq. 8 through a dense `[B, N]` matrix of coefficients."""
    dense = torch.zeros(len(x), len(atoms), dtype=x.dtype).scatter_add(1, index, coefficient)
    return (x - dense @ atoms).square().sum(1).mean()


def drawn(sizes, dtype=torch.float32, seed=0):
    count, atoms, channels, pairs = sizes
    generator = torch.Generator().manual_seed(seed)
    rows = unit_rows(torch.randn(atoms, channels, generator=generator)).to(dtype)
    x = torch.randn(count, channels, generator=generator).to(dtype)
    index = torch.randint(atoms, (count, pairs), generator=generator)
    return rows.requires_grad_(), x, index, torch.randn(count, pairs, generator=generator).to(dtype)


def gradient(loss, atoms):
    return torch.autograd.grad(loss * 1.7, atoms)[0]  # a factor, as beta is


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.floats(0.1, 3), st.integers(0, 99))
def test_diversity_is_the_direct_formula_for_atoms_of_any_length(count, channels, length, seed):
    rows = torch.randn(count, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * length
    direct = plain_diversity(rows)
    assert diversity(rows).item() == pytest.approx(direct.item(), rel=1e-12, abs=1e-12)
    unit = unit_rows(rows.float())
    assert diversity(unit).item() == pytest.approx(plain_diversity(unit.double()).item(), abs=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_are_those_of_autograd(sizes):
    atoms, x, index, coefficient = drawn(sizes)
    for ours, plain in (
        (diversity(atoms), plain_diversity(atoms)),
        (reconstruction(atoms, x, index, coefficient), plain_reconstruction(atoms, x, index, coefficient)),
    ):
        expected = gradient(plain, atoms)
        assert ours.item() == pytest.approx(plain.item(), rel=1e-5, abs=1e-6)
        error = (gradient(ours, atoms) - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < 1e-5


def test_gradients_pass_gradcheck_in_float64():
    atoms = drawn((6, 9, 4, 3), torch.float64)[0]
    assert torch.autograd.gradcheck(diversity, (atoms,))


def test_codes_are_constants_and_repeated_atoms_add_up():
    atoms = torch.eye(3).requires_grad_()
    x, index = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[0, 0]])
    coefficient = torch.tensor([[1.5, 0.5]], requires_grad=True)
    loss = reconstruction(atoms, x, index, coefficient)
    assert loss.item() == 2.0  # x^ = (2, 0, 0)
    loss.backward()
    assert coefficient.grad is None
    assert torch.equal(atoms.grad, torch.tensor([[-4.0, -4.0, 0.0], [0.0] * 3, [0.0] * 3]))  # -2 c (x - x^), c = 2


def test_a_step_against_the_gradient_lowers_the_loss_of_the_batch():
    atoms, x, _, _ = drawn((64, 20, 8, 3), seed=3)
    index, coefficient = matching_pursuit(x, atoms.detach(), 3)
    before = reconstruction(atoms, x, index, coefficient)
    after = reconstruction(atoms.detach() - 1e-2 * gradient(before, atoms), x, index, coefficient)
    assert after < before


def test_beta_weighs_diversity_at_a_tenth_of_the_error_and_never_above_one():
    def beta(mse, penalty):
        return diversity_weight(torch.tensor(mse, requires_grad=True), torch.tensor(penalty, requires_grad=True))

    assert beta(0.2, 0.5).item() == pytest.approx(0.04)
    assert beta(7.0, 0.5).item() == 1
    assert beta(0.0, 0.5).item() == 0
    assert beta(0.2, 0.0).item() == 1  # nothing to weigh
    assert not beta(0.2, 0.5).requires_grad


def test_scattered_rows_add_up_in_float32():
    coefficient, index = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[0, 2], [2, 2]])
    found = scattered(coefficient, index, torch.tensor([[1.0, 10.0], [2.0, 20.0]]), 4)
    assert torch.equal(found, torch.tensor([[1.0, 10.0], [0.0, 0.0], [6.0, 60.0], [0.0, 0.0]]))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_centroids_are_those_of_clusters_far_apart_and_of_length_one():
    centres = torch.randn(12, 10, generator=generator(1)) * 20
    samples = centres.repeat_interleave(50, 0) + 0.1 * torch.randn(600, 10, generator=generator(2))
    found = centroids(samples, 96, generator())  # so many that every cluster gets one to begin with
    assert torch.allclose(found.norm(dim=1), torch.ones(96), atol=1e-6)
    nearest = (unit_rows(centres) @ found.T).amax(1)
    assert (nearest > 0.999).all()
    assert torch.equal(found, centroids(samples, 96, generator()))
    assert not torch.equal(found, centroids(samples, 96, generator(5)))


@pytest.mark.parametrize(
    "samples", [torch.zeros(9, 4), torch.ones(9, 4), torch.eye(9)], ids=["zero", "equal", "as many"]
)
def test_centroids_of_samples_without_clusters_are_unit_rows(samples):
    found = centroids(samples, 9, generator())
    assert found.isfinite().all()
    assert torch.allclose(found.norm(dim=1), torch.ones(9), atol=1e-6)


def test_centroids_that_nothing_is_near_move_to_what_lies_far_from_all():
    """500 times the same vector, so that most centroids start there, and eight others, three times each."""
    rare = 10 * torch.eye(9)[1:].repeat(3, 1)
    found = centroids(torch.cat([10 * torch.eye(9)[:1].repeat(500, 1), rare]), 16, generator())
    assert torch.equal((found @ torch.eye(9)).amax(0), torch.ones(9))
