"""Sums of rows by atom in Triton's interpreter: against a dense product in float64, and as the gradient of a dictionary."""

import pytest
import torch
from tolerances import FLOAT32_FOLD

from calib.kernels.neural_dict import operation, reference, triton
from calib.neural_dict.loss import diversity, reconstruction

pytestmark = pytest.mark.arithmetic

# vectors, pairs, atoms, width: more atoms than pairs, all pairs at a few atoms, partly filled reads.
SIZES = [
    (1, 1, 1, 32),
    (1, 8, 63, 64),
    (63, 4, 200, 80),
    (63, 1, 2, 96),
    (40, 8, 3, 128),
    (1000, 2, 9, 32),
    (9, 3, 20, 256),
    (17, 1, 1, 5),
]


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that was not written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(2).new_empty(100).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def drawn(vectors, pairs, count, width):
    draw = torch.Generator().manual_seed(vectors)
    index = torch.randint(count, (vectors, pairs), generator=draw)
    return torch.randn(vectors, pairs, generator=draw), index, torch.randn(vectors, width, generator=draw)


@pytest.mark.parametrize("sizes", SIZES)
def test_sums_are_those_of_a_dense_product(sizes):
    coefficient, index, rows = drawn(*sizes)
    vectors, _, count, _ = sizes
    dense = torch.zeros(vectors, count, dtype=torch.float64).scatter_add_(1, index, coefficient.double())
    expected, size = dense.mT @ rows.double(), dense.abs().mT @ rows.double().abs()
    found = triton.scattered(coefficient, index, rows, count)
    assert found.shape == expected.shape and found.dtype == torch.float32
    for sums in (found, reference.scattered(coefficient, index, rows, count)):
        assert ((sums - expected).abs() <= FLOAT32_FOLD * size).all()
    assert (found[(dense == 0).all(0)] == 0).all()


def test_pairs_are_added_in_the_order_of_the_batch():
    """Pairs are added 16 at a time in the batch's order, so a sum is the same in every run. A large number that is added first and
    subtracted last makes the order visible."""
    rows = torch.ones(40, 4)
    rows[0], rows[39] = 2.0**24, -(2.0**24)
    index = torch.zeros(40, 1, dtype=torch.int64)
    found = triton.scattered(torch.ones(40, 1), index, rows, 1)
    parts = [part.sum(0) for part in rows.split(triton.PAIRS)]
    assert torch.equal(found[0], (parts[0] + parts[1]) + parts[2])
    assert torch.equal(triton.scattered(torch.ones(40, 1), index + 2, rows, 5)[2], found[0])


def test_tensors_of_any_layout():
    coefficient, index, rows = drawn(20, 4, 7, 32)
    found = triton.scattered(coefficient.mT.contiguous().mT, index.mT.contiguous().mT, rows.mT.contiguous().mT, 7)
    assert torch.equal(found, triton.scattered(coefficient, index, rows, 7))


def test_no_vectors_add_nothing():
    found = triton.scattered(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 8), 5)
    assert torch.equal(found, torch.zeros(5, 8))


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_gradient_of_a_dictionary_is_the_references(weight, monkeypatch):
    """The gradient -2/B sum of c (x - x^) by atom, plus weight times that of the diversity loss, 4 (W W^T W - W) / N^2, by both
    implementations."""
    coefficient, index, x = drawn(50, 4, 30, 64)
    gradients = []
    for form in ("triton", "reference"):
        monkeypatch.setenv("CALIB_KERNELS", form)
        atoms = torch.randn(30, 64, generator=torch.Generator().manual_seed(1)).div(8).requires_grad_()
        (reconstruction(atoms, x, index, coefficient) + weight * diversity(atoms)).backward()
        gradients.append(atoms.grad)
    dense = torch.zeros(50, 30).scatter_add_(1, index, coefficient)
    atoms = atoms.detach()
    whole = -2 / 50 * dense.mT @ (x - dense @ atoms) + weight * 4 / 30**2 * (atoms @ atoms.mT @ atoms - atoms)
    for gradient in gradients:
        torch.testing.assert_close(gradient, whole, rtol=0, atol=FLOAT32_FOLD * float(whole.abs().max()))


@pytest.mark.parametrize(
    ("dtype", "width", "form"),
    [(torch.float32, 64, "triton"), (torch.float64, 64, "reference"), (torch.float32, 257, "reference")],
)
def test_the_operation_takes_what_the_kernel_serves(dtype, width, form, monkeypatch):
    called: list[str] = []
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    for name, module in (("triton", triton), ("reference", reference)):
        of = module.scattered
        monkeypatch.setattr(module, "scattered", lambda *args, name=name, of=of: called.append(name) or of(*args))
    coefficient, index, rows = drawn(5, 2, 6, width)
    found = operation.scattered(coefficient.to(dtype), index, rows.to(dtype), 6)
    assert called == [form] and found.dtype == dtype
