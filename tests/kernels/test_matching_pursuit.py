"""Matching pursuit against a float64 pursuit that follows its choices (`pursuit_walk.walk`): every chosen atom is the best up to
rounding, and coefficients and residual norms agree. Both forms and orthogonal matching pursuit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from law_examples import examples
from pursuit_walk import SHAPES, clustered, lengths_left, normal, problems, randn, tied, unit, walk
from tolerances import FLOAT32_ATTENTION, FLOAT32_FOLD
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calib.kernels.matching_pursuit import operation, reference
from calib.kernels.matching_pursuit.reference import (
    GRAM_ELEMENTS,
    RUN,
    desparsify,
    gram_is_cheaper,
    matching_pursuit,
    orthogonal_matching_pursuit,
    pursuit_by_gram,
    pursuit_by_products,
)

pytestmark = pytest.mark.arithmetic

Pursuit = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
FORMS = [pursuit_by_gram, pursuit_by_products]
ALL = [*FORMS, matching_pursuit, orthogonal_matching_pursuit]


# --- against float64


@pytest.mark.parametrize("made", [normal, clustered])
@pytest.mark.parametrize(("vectors", "width", "count", "sparsity"), SHAPES)
@pytest.mark.parametrize("pursuit", ALL)
def test_every_choice_is_the_best_and_what_is_left_is_that_of_float64(
    pursuit: Pursuit, vectors, width, count, sparsity, made
):
    """Also after 16 steps of the Gram form, which updates its correlations and never computes them anew."""
    x, atoms = made(vectors, width, count)
    before = x.clone(), atoms.clone()
    index, coefficient = pursuit(x, atoms, sparsity)
    assert torch.equal(x, before[0]) and torch.equal(atoms, before[1])
    assert index.shape == coefficient.shape == (vectors, sparsity)
    assert index.dtype == torch.int64 and coefficient.dtype == torch.float32
    orthogonal = pursuit is orthogonal_matching_pursuit
    short, coefficients, left = walk(x, atoms, index, orthogonal)
    scale = left[:, :1]
    assert (short <= FLOAT32_FOLD * scale).all()
    if orthogonal:  # its coefficients are those of the last step
        found = lengths_left(x, atoms, index, coefficient)[:, -1:]
        assert (abs(found - left[:, -1:]) <= FLOAT32_FOLD * scale).all()
    else:
        assert (abs(coefficient.numpy() - coefficients) <= FLOAT32_FOLD * scale).all()
        assert (abs(lengths_left(x, atoms, index, coefficient) - left) <= FLOAT32_FOLD * scale).all()


def free_run(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[np.ndarray, np.ndarray]:
    """A float64 pursuit: its choices `[V, s]`, and for each vector the smallest difference of the two largest correlations,
    relative to |x|."""
    index, margin = np.zeros((len(x), sparsity), dtype=np.int64), np.full(len(x), np.inf)
    dictionary = atoms.double().numpy()
    for row, vector in enumerate(x.double().numpy()):
        residual = vector.copy()
        for step in range(sparsity):
            correlations = dictionary @ residual
            sizes = abs(correlations)
            index[row, step] = sizes.argmax()
            second, first = np.sort(sizes)[-2:]
            margin[row] = min(margin[row], (first - second) / np.linalg.norm(vector))
            residual = residual - correlations[index[row, step]] * dictionary[index[row, step]]
    return index, margin


@pytest.mark.parametrize("made", [normal, clustered])
def test_both_forms_choose_what_float64_does_where_the_margin_allows(made):
    x, atoms = made(400, 48, 333)
    for sparsity in (4, 8):
        expected, margin = free_run(x, atoms, sparsity)
        clear = margin > FLOAT32_FOLD
        assert clear.mean() > 0.95
        (one, first), (other, second) = (form(x, atoms, sparsity) for form in FORMS)
        for index in (one, other):
            np.testing.assert_array_equal(index.numpy()[clear], expected[clear])
        scale = x.norm(dim=-1, keepdim=True)
        assert ((first - second).abs() <= FLOAT32_FOLD * scale)[clear].all()


@pytest.mark.parametrize("pursuit", [*FORMS, orthogonal_matching_pursuit])
def test_more_steps_begin_with_the_same_ones(pursuit: Pursuit):
    x, atoms = normal(60, 16, 100)
    index, coefficient = pursuit(x, atoms, 16)
    for sparsity in (1, 4, 15):
        fewer = pursuit(x, atoms, sparsity)
        assert torch.equal(fewer[0], index[:, :sparsity])
        if pursuit is not orthogonal_matching_pursuit:  # which refits the earlier ones
            assert torch.equal(fewer[1], coefficient[:, :sparsity])


@pytest.mark.parametrize("pursuit", ALL)
def test_of_equals_the_first(pursuit: Pursuit):
    """Of equal correlations the first atom is chosen. Products of small integers are exact: ties within a run, between runs, of
    either sign, and with the padding after N."""
    axes = torch.eye(4)
    atoms = torch.cat([torch.zeros(3, 4), -axes, axes, torch.zeros(2 * RUN, 4), axes])
    x = torch.tensor([[0.0, 5, 5, 1], [0, 0, 0, -7], [2, -2, 2, -2], [0, 0, 0, 0]])
    index, coefficient = pursuit(x, atoms, 4)
    assert index[0, :3].tolist() == [4, 5, 6] and coefficient[0].tolist() == [-5, -5, -1, 0]
    assert index[1].tolist() == [6, 0, 0, 0] and coefficient[1].tolist() == [7, 0, 0, 0]
    assert index[2].tolist() == [3, 4, 5, 6] and coefficient[2].tolist() == [-2, 2, -2, 2]
    assert index[3].tolist() == [0] * 4 and coefficient[3].tolist() == [0] * 4
    assert int(pursuit(x[:1], atoms[-4:], 1)[0]) == 1


@pytest.mark.parametrize("form", [*FORMS, matching_pursuit])
def test_a_repeated_atom_adds_up(form):
    """Two atoms that are not orthogonal are chosen in turn; the sums of their coefficients converge to least
    squares."""
    atoms = torch.tensor([[1.0, 0], [0.6, 0.8]])
    x = torch.tensor([[1.0, 2.0]])
    index, coefficient = form(x, atoms, 40)
    assert index[0, :4].tolist() == [1, 0, 1, 0]
    dense = torch.zeros(1, 2).scatter_add_(1, index, coefficient)
    torch.testing.assert_close(dense @ atoms, x, rtol=0, atol=FLOAT32_FOLD)
    torch.testing.assert_close(desparsify(index, coefficient, atoms), x, rtol=0, atol=FLOAT32_FOLD)
    assert dense.tolist()[0] == pytest.approx([-0.5, 2.5], abs=FLOAT32_FOLD)


# --- what is left never grows


@pytest.mark.full
@settings(max_examples=examples(150), deadline=None)
@given(problems())
def test_what_is_left_never_grows(problem):
    x, atoms, sparsity = problem
    for pursuit in ALL:
        index, coefficient = pursuit(x, atoms, sparsity)
        assert bool(coefficient.isfinite().all())
        assert int(index.min()) >= 0 and int(index.max()) < len(atoms)
        scale = FLOAT32_FOLD * x.double().norm(dim=-1).numpy()
        if pursuit is not orthogonal_matching_pursuit:  # whose first pairs are not the result of fewer steps
            left = lengths_left(x, atoms, index, coefficient)
            assert (np.diff(left) <= scale[:, None]).all()


# --- the rule, memory, the device


def test_the_rule_of_the_forms():
    assert gram_is_cheaper(vectors=2048, count=4096, width=128, sparsity=8)
    assert not gram_is_cheaper(vectors=512, count=4096, width=128, sparsity=8)  # a training step's batch
    assert not gram_is_cheaper(vectors=16, count=512, width=64, sparsity=8)  # a decoding step's block
    assert not gram_is_cheaper(vectors=2**20, count=512, width=64, sparsity=1)  # nothing to update
    assert not gram_is_cheaper(vectors=2**20, count=512, width=16, sparsity=8)  # a product is cheaper than an update
    assert not gram_is_cheaper(vectors=2**20, count=int(GRAM_ELEMENTS**0.5) + 1, width=128, sparsity=8)


@pytest.mark.parametrize("vectors", [3, 400])
def test_the_cheaper_form_is_taken(vectors, monkeypatch):
    x, atoms = normal(vectors, 64, 100)
    called: list[str] = []
    for form in FORMS:
        monkeypatch.setattr(reference, form.__name__, lambda *args, of=form: called.append(of.__name__) or of(*args))
    found = matching_pursuit(x, atoms, 8)
    form = pursuit_by_gram if gram_is_cheaper(vectors, 100, 64, 8) else pursuit_by_products
    assert called == [form.__name__] and (form is pursuit_by_gram) is (vectors == 400)
    assert all(torch.equal(*pair) for pair in zip(found, form(x, atoms, 8), strict=True))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned, except tensors of the shapes `known`."""

    def __init__(self, *known: tuple[int, ...]) -> None:
        super().__init__()
        self.most, self.known = 0, known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.shape not in self.known:
                self.most = max(self.most, made.numel())
        return result


@pytest.mark.full
@pytest.mark.parametrize("tile", [1, 2**10, 2**12])
def test_correlations_at_once_are_bounded(tile, monkeypatch):
    """Apart from x, atoms, pairs and the Gram matrix, no tensor is larger than a tile of correlations, those of one vector, or the
    bases of an orthogonal pursuit. Results do not depend on the tile."""
    x, atoms = normal(100, 16, 256)
    expected = [pursuit(x, atoms, 4) for pursuit in ALL]
    monkeypatch.setattr(reference, "TILE_ELEMENTS", {"cpu": tile})
    monkeypatch.setattr(reference, "BASES_ELEMENTS", 2**11)
    for pursuit, (index, coefficient) in zip(ALL, expected, strict=True):
        gram = [(256, 256)] * (pursuit is pursuit_by_gram)
        with Largest(x.shape, index.shape, atoms.shape, atoms.mT.shape, *gram) as largest:
            found = pursuit(x, atoms, 4)
        assert 0 < largest.most <= max(tile, 256, 2**11 * (pursuit is orthogonal_matching_pursuit))
        assert torch.equal(found[0], index)
        assert (found[1] - coefficient).abs().max() <= FLOAT32_FOLD * x.norm(dim=-1).max()


@pytest.mark.parametrize("pursuit", ALL)
def test_same_in_same_out(pursuit: Pursuit):
    """Repeated calls give the same bits, also after a call with other sizes."""
    x, atoms = clustered(300, 32, 200)
    first = pursuit(x, atoms, 8)
    pursuit(randn(17, 32, seed=9), unit(randn(31, 32, seed=8)), 3)
    assert all(torch.equal(*pair) for pair in zip(first, pursuit(x, atoms, 8), strict=True))


@pytest.mark.parametrize("pursuit", ALL)
def test_a_vector_alone_is_the_vector_among_others(pursuit: Pursuit):
    x, atoms = normal(64, 32, 200)
    index, coefficient = pursuit(x, atoms, 8)
    for row in (0, 31, 63):
        alone = pursuit(x[row : row + 1], atoms, 8)
        assert torch.equal(alone[0][0], index[row])
        torch.testing.assert_close(alone[1][0], coefficient[row], rtol=0, atol=FLOAT32_FOLD * float(x[row].norm()))


@pytest.mark.parametrize("pursuit", ALL)
def test_nothing_waits_for_the_device(pursuit: Pursuit):
    """No number is read back from the device (the meta device would raise an error), and no gradient is recorded."""
    x, atoms = (part.to("meta").requires_grad_() for part in normal(200, 16, 40))
    index, coefficient = pursuit(x, atoms, 4)
    assert index.device.type == coefficient.device.type == "meta" and index.shape == coefficient.shape == (200, 4)
    assert not coefficient.requires_grad
    assert desparsify(index, coefficient, atoms).shape == (200, 16)


@pytest.mark.parametrize("pursuit", ALL)
def test_no_vectors_have_no_pairs(pursuit: Pursuit):
    index, coefficient = pursuit(torch.zeros(0, 8), unit(randn(5, 8)), 3)
    assert index.shape == coefficient.shape == (0, 3)
    assert desparsify(index, coefficient, randn(5, 8)).shape == (0, 8)


# --- back to vectors


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("lead", [(), (5,), (2, 3, 7)])
@pytest.mark.parametrize("sparsity", [1, 4, 16])
def test_desparsify_is_the_product_with_the_dense_code(lead, sparsity, dtype):
    """Coefficients of repeated indices add up: compared with a dense product and with a gather and sum in float64. Pairs may be
    strided."""
    atoms, draw = randn(37, 24).to(dtype), torch.Generator().manual_seed(1)
    index, coefficient = torch.randint(37, (*lead, sparsity), generator=draw), randn(*lead, sparsity, seed=2)
    index[..., -1] = index[..., 0]
    dense = torch.zeros(*lead, 37, dtype=torch.float64).scatter_add_(-1, index, coefficient.double())
    found = desparsify(index, coefficient, atoms)
    assert found.dtype == torch.float32 and found.shape == (*lead, 24)
    gathered = (coefficient.double()[..., None] * atoms.double()[index]).sum(-2)
    for expected in (dense @ atoms.double(), gathered):
        assert (found - expected).abs().max() < FLOAT32_ATTENTION * max(1, expected.abs().max())
    strided = desparsify(index[..., ::2], coefficient[..., ::2].half(), atoms)
    halves = coefficient[..., ::2].half()
    assert torch.equal(strided, desparsify(index[..., ::2].contiguous(), halves.float().contiguous(), atoms))


@pytest.mark.parametrize("made", [clustered, tied])
@pytest.mark.parametrize(("width", "count"), [(32, 512), (64, 300), (128, 1024)])
@pytest.mark.parametrize("pursuit", ALL)
def test_a_vector_has_the_same_bits_in_any_company(pursuit: Pursuit, width, count, made):
    """Choices and coefficients do not depend on the other vectors of a call, even near ties, although the rounding of a matrix
    product depends on its shape."""
    x, atoms = made(1500, width, count)
    x, atoms = x.contiguous(), atoms.contiguous()
    index, coefficient = pursuit(x, atoms, 8)
    for first, size in ((0, 1), (3, 1), (700, 16), (0, 129), (200, 1000)):
        part = slice(first, first + size)
        alone, kept = pursuit(x[part].clone(), atoms, 8)
        assert torch.equal(alone, index[part])
        if pursuit is orthogonal_matching_pursuit:  # solved together
            assert (kept - coefficient[part]).abs().max() <= FLOAT32_FOLD * coefficient.abs().max()
        else:
            assert torch.equal(kept, coefficient[part])


@pytest.mark.parametrize("made", [clustered, tied])
def test_both_forms_find_the_same_bits(made):
    """The number of vectors decides which form runs, so a prompt and a block may use different ones."""
    x, atoms = made(1500, 64, 300)
    found = [form(x, atoms, 8) for form in FORMS]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_coefficients_have_the_digits_of_the_vectors(dtype):
    """Coefficients are float64 for float64 vectors, and as precise; vectors and atoms in 16 bits are computed in float32."""
    x, atoms = normal(40, 16, 32)
    x, atoms = x.to(dtype), atoms.to(dtype)
    index, coefficient = operation.matching_pursuit(x, atoms, 4)
    wide = torch.promote_types(dtype, torch.float32)
    assert coefficient.dtype == wide and index.dtype == torch.int64
    _, expected, left = walk(x.double(), atoms.double(), index)
    bound = torch.finfo(wide).eps * 2**6
    assert (abs(coefficient.double().numpy() - expected) <= bound * left[:, :1]).all()
