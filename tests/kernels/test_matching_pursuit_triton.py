"""The kernel of matching pursuit in Triton's interpreter, against a float64 pursuit that follows its choices (`pursuit_walk.walk`);
ties, precision, and the choice of implementation."""

import pytest
import torch
from pursuit_walk import clustered, lengths_left, normal, randn, unit, walk
from tolerances import FLOAT32_FOLD

from calib.kernels.matching_pursuit import operation, reference, triton

pytestmark = pytest.mark.arithmetic

# vectors, width, atoms, sparsity: every head width, a single vector, partly filled programs and tiles.
SIZES = [
    (1, 32, 1, 1),
    (63, 64, 63, 4),
    (1, 80, 65, 8),
    (130, 96, 200, 2),
    (7, 128, 64, 16),
    (65, 128, 129, 3),
    (3, 256, 100, 4),
    (5, 3, 2, 16),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that was not written holds NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(2).new_empty(100).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("made", "stored"), [(normal, torch.float32), (clustered, torch.float16)])
@pytest.mark.parametrize(("vectors", "width", "count", "sparsity"), SIZES)
def test_every_choice_is_the_best_and_what_is_left_is_that_of_float64(vectors, width, count, sparsity, made, stored):
    x, atoms = made(vectors, width, count)
    if stored == torch.float32:  # with more digits than float16
        atoms = torch.nn.functional.normalize(atoms, dim=-1)
    atoms = atoms.to(stored)
    before = x.clone(), atoms.clone()
    index, coefficient = triton.matching_pursuit(x, atoms, sparsity)
    assert torch.equal(x, before[0]) and torch.equal(atoms, before[1])
    assert index.shape == coefficient.shape == (vectors, sparsity)
    assert index.dtype == torch.int64 and coefficient.dtype == torch.float32
    short, coefficients, left = walk(x, atoms.float(), index)
    scale = left[:, :1]
    assert (short <= FLOAT32_FOLD * scale).all()
    assert (abs(coefficient.numpy() - coefficients) <= FLOAT32_FOLD * scale).all()
    assert (abs(lengths_left(x, atoms.float(), index, coefficient) - left) <= FLOAT32_FOLD * scale).all()


def test_the_pairs_are_the_references():
    x, atoms = normal(40, 64, 150)
    index, coefficient = triton.matching_pursuit(x, atoms, 6)
    expected = reference.matching_pursuit(x, atoms, 6)
    assert torch.equal(index, expected[0])
    assert ((coefficient - expected[1]).abs() <= FLOAT32_FOLD * x.norm(dim=-1, keepdim=True)).all()


def test_of_equals_the_first():
    """Of equal correlations the first atom is chosen. Products of small integers are exact: ties within a tile, between tiles, of
    either sign, and with the padding after N."""
    axes = torch.eye(4)
    atoms = torch.cat([torch.zeros(3, 4), -axes, axes, torch.zeros(128, 4), axes])
    x = torch.tensor([[0.0, 5, 5, 1], [0, 0, 0, -7], [2, -2, 2, -2], [0, 0, 0, 0]])
    index, coefficient = triton.matching_pursuit(x, atoms, 4)
    assert index[0, :3].tolist() == [4, 5, 6] and coefficient[0].tolist() == [-5, -5, -1, 0]
    assert index[1].tolist() == [6, 0, 0, 0] and coefficient[1].tolist() == [7, 0, 0, 0]
    assert index[2].tolist() == [3, 4, 5, 6] and coefficient[2].tolist() == [-2, 2, -2, 2]
    assert index[3].tolist() == [0] * 4 and coefficient[3].tolist() == [0] * 4
    assert triton.matching_pursuit(x[:1], axes, 1)[0].tolist() == [[1]]


@pytest.mark.parametrize(("first", "second"), [(40, 10), (10, 75), (75, 10)])
def test_of_equals_of_two_tiles_and_columns_the_first(first, second):
    """The first atom is chosen, also if the second one has the earlier column in its tile."""
    atoms = torch.zeros(100, 32)
    atoms[first] = atoms[second] = unit(torch.ones(32))
    assert triton.matching_pursuit(torch.ones(1, 32), atoms, 1)[0].item() == min(first, second)


def test_digits_that_one_float16_has_not_decide():
    """Differences of 2^-18 in an atom's length, or in an entry of the residual, decide the choice; also next to an entry of 100."""
    atom = randn(1, 64)
    atoms = torch.cat([atom, atom * (1 + 2**-18)]) / atom.norm()
    index, _ = triton.matching_pursuit(randn(20, 64, seed=1), atoms, 1)
    assert (index == 1).all()
    axes = torch.eye(16)
    for stored in (axes, axes.half()):
        x = torch.zeros(1, 16)
        x[0, :2] = torch.tensor([1.0, 1 + 2**-18])
        assert triton.matching_pursuit(x, stored, 2)[0].tolist() == [[1, 0]]
        x[0, 5] = 100
        assert triton.matching_pursuit(x, stored, 3)[0].tolist() == [[5, 1, 0]]


@pytest.mark.parametrize("scale", [2.0**-120, 1e-12, 1e-3, 1e4, 1e30])
def test_the_size_of_a_vector_does_not_matter(scale):
    x, atoms = normal(8, 32, 90)
    index, coefficient = triton.matching_pursuit(x, atoms, 4)
    found = triton.matching_pursuit(x * scale, atoms, 4)
    assert torch.equal(found[0], index)
    torch.testing.assert_close(found[1] / scale, coefficient, rtol=0, atol=FLOAT32_FOLD * float(x.norm(dim=-1).min()))


def test_vectors_of_all_sizes_share_a_program():
    x, atoms = normal(9, 32, 90)
    index, _ = triton.matching_pursuit(x, atoms, 4)
    sizes = torch.logspace(-20, 20, 9)[:, None]
    sizes[4] = 0
    found, coefficient = triton.matching_pursuit(x * sizes, atoms, 4)
    rows = torch.arange(9) != 4
    assert torch.equal(found[rows], index[rows])
    assert found[4].tolist() == coefficient[4].tolist() == [0] * 4


def test_atoms_of_any_length_below_sixteen():
    x, atoms = normal(20, 32, 90)
    atoms = atoms * torch.logspace(-2, 1, 90)[:, None]
    index, _ = triton.matching_pursuit(x, atoms, 1)
    assert torch.equal(index[:, 0], (x @ atoms.mT).abs().argmax(-1))


def test_no_position_lies_outside_the_dictionary():
    """Positions are within the dictionary even for vectors or atoms of NaN and infinity; the other vectors keep their bits."""
    x, atoms = normal(4, 32, 70)
    x[0], x[1] = torch.nan, torch.inf
    for dictionary in (atoms, torch.full_like(atoms, torch.nan)):
        index, _ = triton.matching_pursuit(x, dictionary, 3)
        assert int(index.min()) >= 0 and int(index.max()) < 70
    index, coefficient = triton.matching_pursuit(x, atoms, 3)
    assert coefficient[:2].isfinite().sum() == 0 and coefficient[2:].isfinite().all()
    alone = triton.matching_pursuit(x[2:], atoms, 3)
    assert torch.equal(alone[0], index[2:]) and torch.equal(alone[1], coefficient[2:])


@pytest.mark.full
def test_a_vector_has_the_same_bits_in_any_company(monkeypatch):
    x, atoms = normal(140, 80, 100)
    index, coefficient = triton.matching_pursuit(x, atoms, 4)
    for first, size in ((0, 1), (70, 9), (11, 129)):
        alone, kept = triton.matching_pursuit(x[first : first + size], atoms, 4)
        assert torch.equal(alone, index[first : first + size]) and torch.equal(kept, coefficient[first : first + size])
    monkeypatch.setattr(triton, "MANY", 0)
    assert triton.tile_of(140, 80, triton.ROOMY)["BV"] == triton.MANY_ROWS
    large = triton.matching_pursuit(x, atoms, 4)
    assert torch.equal(large[0], index) and torch.equal(large[1], coefficient)


def test_tensors_of_any_layout():
    x, atoms = normal(10, 32, 70)
    expected = triton.matching_pursuit(x, atoms, 3)
    found = triton.matching_pursuit(x.mT.contiguous().mT, torch.cat([atoms, atoms], 1)[:, :32], 3)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_tiles_fit_the_device():
    """Large tiles are used for many vectors if shared memory suffices; otherwise smaller tiles or fewer stages."""
    assert triton.tile_of(2**20, 128, triton.ROOMY) == {"BV": 128, "BN": 64, "BD": 128, "num_warps": 8, "num_stages": 3}
    assert triton.tile_of(100, 128, triton.ROOMY) == {"BV": 64, "BN": 64, "BD": 128, "num_warps": 4, "num_stages": 3}
    assert triton.tile_of(2**20, 80, 99 * 2**10) == {"BV": 64, "BN": 64, "BD": 128, "num_warps": 4, "num_stages": 2}
    assert triton.tile_of(2**20, 256, triton.ROOMY) == {"BV": 128, "BN": 32, "BD": 256, "num_warps": 8, "num_stages": 2}


# --- the operation


@pytest.fixture
def called(monkeypatch):
    """Names of the implementations that ran, with CALIB_KERNELS=triton."""
    forms: list[str] = []
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    for name, module in (("triton", triton), ("reference", reference)):
        of = module.matching_pursuit
        monkeypatch.setattr(module, "matching_pursuit", lambda *args, name=name, of=of: forms.append(name) or of(*args))
    return forms


@pytest.mark.parametrize(
    ("dtype", "stored", "width", "form"),
    [
        (torch.float32, torch.float32, 64, "triton"),
        (torch.float32, torch.float16, 64, "triton"),
        (torch.float32, torch.bfloat16, 64, "reference"),
        (torch.float32, torch.float32, 257, "reference"),
    ],
)
def test_the_operation_takes_what_the_kernel_serves(called, dtype, stored, width, form, monkeypatch):
    x, atoms = normal(4, width, 20)
    index, coefficient = operation.matching_pursuit(x.to(dtype).requires_grad_(), atoms.to(stored), 3)
    assert called == [form] and index.shape == coefficient.shape == (4, 3) and not coefficient.requires_grad
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    expected = operation.matching_pursuit(x.to(dtype), atoms.to(stored), 3)
    assert called == [form, "reference"] and torch.equal(index, expected[0])


def test_no_vectors_have_no_pairs(called):
    index, coefficient = operation.matching_pursuit(torch.zeros(0, 8), unit(randn(5, 8)), 3)
    assert called == ["triton"] and index.shape == coefficient.shape == (0, 3)
