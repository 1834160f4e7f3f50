"""Tests of CSR's float64 oracle: results worked out by hand, and how far mistakes are beyond its tolerance."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from csr.coder import Coder, Word
from csr.coefficients import choices, eight, stored
from csr.corrections import Corrections
from csr.dictionary import sample, unclear
from csr.pursuit import DOUBT, REACH, fitted, lead, pursue, readings, rebuilt
from csr.rotation import rotated
from csr.spec import Spec
from importance.draws import counter_hash

pytestmark = pytest.mark.arithmetic

FREQUENCIES = 10000.0 ** (-np.arange(16) / 16)


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    """Random atoms of norm 1, rounded to float16 as they are stored."""
    rows = np.random.default_rng(seed).standard_normal(shape)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float16).astype(np.float64)


def vectors(*shape: int, seed: int = 1) -> np.ndarray:
    """Random vectors, rounded to float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


# --- pursuit ----------------------------------------------------------------------------------------------------------


def test_a_pursuit_by_hand():
    """(-4, 3) takes -4 of the first axis; of the rest (0, 3) the second axis, not (.6, .8). In the last two cases (5, 1) takes 5 of
    the first axis and .8 of (.6, .8); orthogonally, least squares gives 4.25 and 1.25."""
    atoms = np.array([[1, 0], [0.6, 0.8], [0, 1]])
    index, coefficient = pursue(np.array([[-4.0, 3.0]]), atoms, 3, orthogonal=False)
    assert index.tolist() == [[0, 2, 0]] and np.allclose(coefficient, [[-4, 3, 0]])
    index, coefficient = pursue(np.array([[1.2, 1.6]]), atoms[[0, 2]], 2, orthogonal=False)
    assert index.tolist() == [[1, 0]] and np.allclose(coefficient, [[1.6, 1.2]])
    index, coefficient = pursue(np.array([[5.0, 1.0]]), atoms[:2], 2, orthogonal=False)
    assert index.tolist() == [[0, 1]] and np.allclose(coefficient, [[5, 0.8]])
    index, coefficient = pursue(np.array([[5.0, 1.0]]), atoms[:2], 2, orthogonal=True)
    assert index.tolist() == [[0, 1]] and np.allclose(coefficient, [[4.25, 1.25]])


def test_residuals():
    """Residuals never grow with more steps; in orthogonal pursuit they are smaller, and orthogonal to every chosen atom."""
    x, atoms = vectors(200, 16), unit(64, 16)
    found = {}
    for orthogonal in (False, True):
        sizes = [np.linalg.norm(x, axis=1)]
        for steps in range(1, 9):
            index, coefficient = pursue(x, atoms, steps, orthogonal)
            residual = x - rebuilt(index, coefficient, atoms)
            sizes.append(np.linalg.norm(residual, axis=1))
            if orthogonal:
                assert abs(np.einsum("vd,vsd->vs", residual, atoms[index])).max() < 1e-12
        assert (np.diff(sizes, axis=0) <= 1e-12).all()
        found[orthogonal] = sizes
    assert [np.array_equal(one, other) for one, other in zip(*found.values(), strict=True)][:1] == [True]
    assert np.allclose(found[True][1], found[False][1], rtol=1e-3)  # equal up to the norms of float16 atoms
    assert all((found[True][steps].mean() < found[False][steps].mean()) for steps in range(2, 9))


def test_atoms_that_depend_on_each_other():
    """Coefficients are finite and x^ = x if an atom occurs twice or is 0, or x is 0."""
    atoms = np.stack([np.eye(4)[0], np.eye(4)[0], np.zeros(4), np.eye(4)[1]])
    for x in (np.array([[3.0, 2, 0, 0]]), np.zeros((1, 4))):
        for orthogonal in (False, True):
            index, coefficient = pursue(x, atoms, 4, orthogonal)
            assert np.allclose(rebuilt(index, coefficient, atoms), x) and index[0, 0] == 0
    assert np.allclose(fitted(np.array([[3.0, 2, 0, 0]]), atoms[None]), [[3, 0, 0, 2]])


def test_readings_follow_every_near_tie():
    atoms = np.eye(3)
    one, other, rest = (list(readings(np.array(x), atoms, 2, False)) for x in ([3.0, 3, 1], [3.0, 2, 1], [3.0, 2, 2]))
    assert sorted(index.tolist() for index, _, _ in one) == [[0, 1], [1, 0]]
    assert [index.tolist() for index, _, _ in other] == [[0, 1]]
    assert [index.tolist() for index, _, _ in rest] == [[0, 1], [0, 2]]  # the exact one first
    near = 3 + 3 * DOUBT
    assert len(list(readings(np.array([3.0, near, 1]), atoms, 1, False))) == 2
    assert len(list(readings(np.array([3.0, near + 3 * DOUBT, 1]), atoms, 1, False))) == 1
    assert lead(np.array([[3.0, 2, 1]]), atoms, 2, False) == pytest.approx(1 / 14**0.5)
    ((index, coefficient, _),) = readings(np.array([0.0, 5, 0]), atoms, 3, False)  # nothing is left after a step
    assert index.tolist() == [1] and coefficient.tolist() == [5]


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_exact_reading_comes_first(orthogonal):
    x, atoms = vectors(40, 16), unit(64, 16)
    index, coefficient = pursue(x, atoms, 6, orthogonal)
    for number, vector in enumerate(x):
        first, kept, _ = next(readings(vector, atoms, 6, orthogonal))
        assert first.tolist() == index[number].tolist() and np.allclose(kept, coefficient[number])


# --- coefficients -----------------------------------------------------------------------------------------------------


def test_eight_bits_of_float():
    c = np.concatenate([vectors(4000) * 10.0 ** np.linspace(-4, 2, 4000), [0, 448, -448, 1e9, -449, 2.0**-9, 2.0**-10]])
    theirs = torch.from_numpy(c).clamp(-448, 448).float().to(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(eight(c.astype(np.float32).astype(np.float64)), theirs)


def test_whole_numbers_by_hand():
    """4 bits: codes up to 7, so a largest coefficient of 14 gives the scale 2, and -13.2 is rounded to -7 x 2."""
    c = np.array([14.0, -13.2, 0.9, -1.1, 5.0])
    assert stored(c, 4).tolist() == [14, -14, 0, -2, 4]
    assert stored(np.array([3.0, -1.4, 1.6]), 2).tolist() == [3, 0, 3]
    assert stored(np.zeros(3), 8).tolist() == [0, 0, 0]
    assert stored(np.array([1.0, 0.1]), 8).tolist() == [
        127 * float(np.float16(1 / 127)),
        13 * float(np.float16(1 / 127)),
    ]


def test_choices_are_both_sides_of_a_border():
    def found(c, error, form, wide=False):
        return [tuple(way) for way in choices(np.array(c), np.array(error), form, wide)]

    assert found([1.0, 2.0], [0, 0], "fp16") == [(1, 2)]
    border = 1 + 2.0**-11
    assert found([border, 2.0], [1e-6, 0], "fp16") == [(1, 2), (1 + 2.0**-10, 2)]
    assert found([7.0, 2.5], [0, 1e-6], 4) == [(7, 2), (7, 3)]
    assert len(found([7.0 + 7 * 2.0**-11, 2.0], [1e-5, 1e-5], 4)) == 2  # either scale
    assert found([1e6, 1.0], [0, 0], "fp16") == [(65504, 1)] and found([1e6, 1.0], [0, 0], "fp16", True) == [(1e6, 1)]
    assert found([1e6, 1.0], [0, 0], "fp8") == [(448, 1)]


# --- rotation, dictionary, schedule -----------------------------------------------------------------------------------


def test_rotation_is_multiplication_of_complex_numbers():
    x, positions = vectors(5, 34), np.arange(5) * 7
    z = (x[:, :16] + 1j * x[:, 16:32]) * np.exp(1j * positions[:, None] * FREQUENCIES)
    assert np.allclose(rotated(x, positions, FREQUENCIES), np.concatenate([z.real, z.imag, x[:, 32:]], 1))
    assert np.allclose(rotated(rotated(x, positions, FREQUENCIES), -positions, FREQUENCIES), x)


def test_own_atoms_by_hand():
    """Of five items four become atoms: the first two in the order of the draws, then the two others with the largest errors."""
    items = np.array([[3.0, 4], [0, 2], [5, 0], [7, 7], [1, 0]])
    draws = np.argsort([counter_hash(9, 1, 2, item) for item in range(5)])
    drawn, others = draws[:2], sorted(draws[2:])
    offline = np.array([[1.0, 0]])
    left = {item: abs(items[item, 1]) for item in others}  # a pursuit over (1, 0)
    worst = sorted(others, key=lambda item: (-left[item], item))[:2]
    found = sample(items, offline, 6, 1, False, (9, 1, "values"))  # room for six, items for five
    assert len(found.atoms) == 7 and not found.atoms[6:].any()
    found = sample(items, offline, 4, 1, False, (9, 1, "values"))
    expected = [items[item] / np.linalg.norm(items[item]) for item in [*drawn, *worst]]
    assert np.array_equal(found.atoms, np.concatenate([offline, np.array(expected).astype(np.float16)]))
    assert sample(items, offline, 1, 1, False, (9, 1, "values")).atoms.tolist()[1:] == [found.atoms[1].tolist()]


def test_shares_of_both_samplings_by_hand():
    """Share 0: all atoms are drawn. Share 1: the items with the largest errors under the atom (1, 0); without it, the longest."""
    items, where = np.array([[3.0, 4], [0, 2], [5, 1], [7, 3], [1, 0]]), (9, 1, "values")
    unit_of = (items / np.linalg.norm(items, axis=1, keepdims=True)).astype(np.float16)
    drawn = np.argsort([counter_hash(9, 1, 2, item) for item in range(5)])
    offline, none = np.array([[1.0, 0]]), np.zeros((0, 2))
    assert np.array_equal(sample(items, none, 3, 1, False, where, 0).atoms, unit_of[drawn[:3]])
    assert np.array_equal(sample(items, offline, 3, 1, False, where, 1).atoms[1:], unit_of[[0, 3, 1]])
    assert np.array_equal(sample(items, none, 3, 1, False, where, 1).atoms, unit_of[[3, 2, 0]])
    rest = sorted(set(range(5)) - {drawn[0]}, key=lambda item: -abs(items[item, 1]))
    found = sample(items, offline, 4, 1, False, where, 0.75)
    assert np.array_equal(found.atoms[1:], unit_of[[drawn[0], *rest[:3]]])
    assert np.array_equal(found.atoms, sample(items, offline, 4, 1, False, where, 0.9).atoms)


def test_a_dictionary_in_doubt():
    """Two items with equal errors make a dictionary uncertain if only one of them is taken, unless they are equal."""
    items = vectors(6, 4)
    draws = np.argsort([counter_hash(0, 0, 1, item) for item in range(6)])
    last, other = sorted(draws[2:])[:2]
    offline = np.eye(4)[:1]
    for item in draws[2:]:
        items[item, 1:] /= 10
    items[last], items[other] = [1, 5, 0, 0], [1, 0, 5, 0]
    assert not sample(items, offline, 3, 1, False, (0, 0, "keys")).sure
    assert sample(items, offline, 4, 1, False, (0, 0, "keys")).sure
    items[other] = items[last]
    assert sample(items, offline, 3, 1, False, (0, 0, "keys")).sure
    clear = np.array([[1.0, 0.5, 0.25, 0.75]])
    assert not unclear(clear / np.linalg.norm(clear), abs(clear))[0]
    border = np.array([[0.6 + 2.0**-12, 0.8]])
    border = border / border[0, 0] * (np.float64(np.float16(0.6)) + 2.0**-12)
    border[0, 1] = np.sqrt(1 - border[0, 0] ** 2)
    assert unclear(border, abs(border))[0]


def test_chunks():
    spec = Spec()
    assert spec.spans(130, 130) == [(0, 66)] and spec.spans(130, 145) == [(0, 66)]
    assert spec.spans(130, 146) == [(0, 66), (66, 82)]
    assert spec.spans(7, 79) == [] and spec.spans(7, 80) == [(0, 16)] and spec.spans(7, 112)[-1] == (32, 48)
    assert spec.spans(70, 79) == [] and spec.spans(70, 80) == [(0, 16)]
    assert replace(spec, window=0, block=1).spans(3, 5) == [(0, 3), (3, 4), (4, 5)]


# --- what is stored of a token ----------------------------------------------------------------------------------------

MISTAKES = {
    "another position": {"position": 1},
    "another atom": {"atom": 1},
    "a step too few": {"steps": -1},
    "a step too many": {"steps": 1},
    "another pursuit": {"pursuit": "orthogonal"},
    "another format": {"coefficients": "fp8"},
    "coefficients not rounded": {"coefficients": None},
    "the atoms of another layer": {"seed": 1},
}


def word(steps_more: int = 0, position: int = 77, atoms_seed: int = 0, x_seed: int = 1, **options) -> Word:
    spec = Spec(sparsity=8 + steps_more, **options)
    coder = Coder(spec, "keys", 0, unit(128, 32, seed=atoms_seed), FREQUENCIES)
    return coder.encode(vectors(1, 32, seed=x_seed), np.array([position]))[0]


def test_float32_comes_to_what_is_stored():
    """A pursuit in float32 stays within the tolerance for every token, and within a tenth of it for nine in ten."""
    atoms, x, positions = unit(128, 32), vectors(300, 32), np.arange(300)
    for orthogonal in (False, True):
        spec = Spec(pursuit="orthogonal" if orthogonal else "matching")
        words = Coder(spec, "keys", 0, atoms, FREQUENCIES).encode(x, positions)
        low = rotated(x.astype(np.float32), -positions, FREQUENCIES).astype(np.float32)
        residual, single = low.copy(), atoms.astype(np.float32)
        index, coefficient = np.zeros((300, 8), dtype=int), np.zeros((300, 8), dtype=np.float32)
        for step in range(8):
            correlation = residual @ single.T
            index[:, step] = abs(correlation).argmax(1)
            coefficient[:, step] = np.take_along_axis(correlation, index[:, step : step + 1], 1)[:, 0]
            if orthogonal:
                chosen = single[index[:, : step + 1]]
                coefficient[:, : step + 1] = [
                    np.linalg.lstsq(a.T, v, rcond=None)[0] for a, v in zip(chosen, low, strict=True)
                ]
                residual = low - np.einsum("vs,vsd->vd", coefficient[:, : step + 1], chosen)
            else:
                residual -= coefficient[:, step : step + 1] * single[index[:, step]]
        kept = coefficient.astype(np.float16).astype(np.float32)
        found = np.einsum("vs,vsd->vd", kept, single[index])
        forward = rotated(found, positions, FREQUENCIES).astype(np.float32)
        errors = [own.error(mine.astype(np.float64)) for own, mine in zip(words, forward, strict=True)]
        assert max(errors) <= 1 and np.quantile(errors, 0.9) < 0.1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_far_beyond_the_tolerance(mistake):
    change = MISTAKES[mistake]
    seen = []
    for seed in range(30):
        own = word(x_seed=seed)
        if "position" in change:
            wrong = rotated(own.approximation[None], np.array([1]), FREQUENCIES)[0]
        elif "atom" in change:
            index, coefficient = pursue(own.filled[None], own.coder.atoms, 8, False)
            index[0, -1] = (index[0, -1] + 1) % 128
            wrong = own.coder.forward(rebuilt(index, coefficient, own.coder.atoms)[0], own.position)
        elif "steps" in change:
            wrong = word(change["steps"], x_seed=seed).approximation
        elif "seed" in change:
            wrong = word(atoms_seed=1, x_seed=seed).approximation
        elif change.get("coefficients", "") is None:
            pairs = pursue(own.filled[None], own.coder.atoms, 8, False)
            wrong = own.coder.forward(rebuilt(*pairs, own.coder.atoms)[0], own.position)
        else:
            wrong = word(x_seed=seed, **change).approximation
        seen.append(own.error(wrong))
    assert min(seen) > 5, min(seen)


def test_values_have_a_scale_for_both_chunks():
    """Both chunks of a value share a scale, which the largest coefficient of either sets."""
    spec = Spec(sparsity=4, coefficients=4)
    coder = Coder(spec, "values", 0, np.eye(2), FREQUENCIES)
    (found,) = coder.encode(np.array([[14.0, 0.9, 2.9, -13.2]]), np.array([5]))
    assert found.approximation.tolist() == [14, 0, 2, -14] and found.error(np.array([14.0, 0, 2, -14])) == 0
    assert found.error(np.array([14.0, 0, 2, -12])) > 1 / REACH / 20


def test_corrections_by_hand():
    """The outliers 8 and -8 are replaced by the mean 1. With pairs of 0, the four levels 0 ... 3 of two bits are exact. Without
    outliers and with one bit, levels are the middles of the halves of the groups' ranges 0 ... 8 and -8 ... 1."""
    spec = Spec(sparsity=1, value_chunks=1, corrections={"outliers": 0.34, "residual_bits": 2})
    own = Corrections.of(spec)
    y = np.array([[8.0, 0, 2, 3, -8, 1, 0, 0]])
    kept, outliers = own.split(y)
    assert outliers.nonzero()[1].tolist() == [0, 4] and kept.tolist() == [[1, 0, 2, 3, 1, 1, 0, 0]]
    found = own.around(y[0], kept[0], outliers[0], np.zeros(8))
    assert found.nominal.tolist() == y[0].tolist() and found.distance(y[0]) == 0
    assert found.distance(y[0] + np.eye(8)[3]) > 0.9 and found.distance(y[0] + np.eye(8)[0]) > 0.9
    coarse = Corrections.of(replace(spec, corrections={"residual_bits": 1, "residual_group": 4}))
    assert coarse.around(y[0], y[0], outliers[0] & False, np.zeros(8)).nominal.tolist() == [
        6,
        2,
        2,
        2,
        -5.75,
        -1.25,
        -1.25,
        -1.25,
    ]
