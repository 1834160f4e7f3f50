"""Divergences against plain float64 code, their properties on any sample, and CSR's groups by eq. 6 and 7 and as published."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples

from calib.errors import UsageError
from calib.layer_groups.divergence import divergences
from calib.layer_groups.grouping import layer_groups, members

pytestmark = pytest.mark.arithmetic

# A vector at a bin's edge is in the one bin in float32 and in the other in float64: each moves 1/V of a distribution, which
# changes the divergence by less than ln(2)/V. None of the samples below has more than 20 of them.
EDGES = 20 * math.log(2)


def twin(first: torch.Tensor, second: torch.Tensor) -> float:
    """The definition, in float64: singular value decomposition, numpy's histogram, sums over bins."""
    unit = [(x / x.norm(dim=1, keepdim=True)).numpy() for x in (first.double(), second.double())]
    both = np.concatenate(unit)
    axes = np.linalg.svd(both - both.mean(0), full_matrices=False)[2][:2]
    points = [x @ axes.T for x in unit]
    joint = np.concatenate(points)
    limits = list(zip(joint.min(0), joint.max(0), strict=True))
    p, q = (np.histogram2d(*x.T, bins=200, range=limits)[0].ravel() / len(x) for x in points)
    total = 0.0
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        middle = (a + b) / 2
        total += sum(x / 2 * math.log(x / middle) for x in (a, b) if x > 0)
    return total


def cloud(seed: int, vectors: int = 600, channels: int = 16, span: float = 0.3, shift: float = 0.0) -> torch.Tensor:
    """Vectors that differ in variance from channel to channel, so that components are told apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(vectors, channels, generator=generator)
    return x * torch.exp(-span * torch.arange(channels)) + shift


@pytest.mark.parametrize("vectors", [50, 5000])
def test_divergences_are_those_of_the_definition(vectors):
    x = {layer: cloud(layer, vectors, shift=layer / 3) for layer in range(4)}
    found = divergences(x, 4)
    assert found.dtype == torch.float32
    assert torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.zeros(4))
    for first in range(4):
        for second in range(first):
            assert found[first, second].item() == pytest.approx(twin(x[first], x[second]), abs=EDGES / vectors)


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 10**6), vectors=st.integers(1, 300), channels=st.integers(2, 20))
def test_what_holds_for_any_sample(seed, vectors, channels):
    x, y = cloud(seed, vectors, channels), cloud(seed + 1, vectors, channels, shift=0.5)
    order = torch.randperm(vectors, generator=torch.Generator().manual_seed(seed))
    found = divergences({0: x, 1: x.clone(), 2: x[order], 3: 7 * x, 4: y}, 6)
    assert float(found.min()) >= 0
    assert float(found.max()) <= np.float32(math.log(2))
    assert found[0, 1] == 0
    # Sums in another order turn the components by a rounding error, which may carry a vector over a bin's edge.
    assert found[0, 2].item() <= 2 * EDGES / vectors
    assert found[0, 3].item() <= 2 * EDGES / vectors  # only directions count
    assert found[4, 0].item() == pytest.approx(found[4, 2].item(), abs=2 * EDGES / vectors)
    assert torch.equal(found[5, :5], torch.full((5,), math.log(2)))  # a layer without vectors


def test_samples_that_share_no_bin_are_ln_2_apart():
    x, y = cloud(0, span=2.0, shift=3.0), cloud(1, span=2.0, shift=-3.0)
    assert divergences({0: x, 1: y}, 2)[0, 1].item() == pytest.approx(math.log(2), abs=1e-7)


def test_vectors_that_are_all_one_or_all_zero():
    one = torch.ones(9, 4)
    found = divergences({0: one, 1: 2 * one, 2: torch.zeros(9, 4)}, 3)
    assert found[0, 1] == 0
    assert found[0, 2].item() == pytest.approx(math.log(2), abs=1e-7)


def test_unequal_numbers_are_refused():
    with pytest.raises(ValueError, match=r"layers have \[5, 6\] vectors: divergences compare equal numbers only"):
        divergences({0: torch.randn(5, 4), 1: torch.randn(6, 4)}, 2)


@pytest.mark.parametrize(("vectors", "low", "high"), [(4096, 0.46, 0.51), (32768, 0.11, 0.13)])
def test_the_bias_is_what_the_docstring_says(vectors, low, high):
    generator = torch.Generator().manual_seed(0)
    found = divergences({layer: torch.randn(vectors, 64, generator=generator) for layer in range(2)}, 2)
    assert low < found[0, 1].item() < high


def symmetric(adjacent: list[float], others: float) -> torch.Tensor:
    layers = len(adjacent) + 1
    found = torch.full((layers, layers), others)
    for layer, value in enumerate(adjacent):
        found[layer, layer + 1] = found[layer + 1, layer] = value
    return found.fill_diagonal_(0)


@pytest.mark.parametrize(
    ("divergence", "delta2", "expected"),
    [
        (symmetric([0.2, 0.2, 0.2], 0.2), 1.0, [0, 0, 0, 0]),  # at both thresholds
        (symmetric([0.1, 0.25, 0.1], 0.1), 1.0, [0, 0, 1, 1]),  # an adjacent pair too far apart
        (symmetric([0.1, 0.1, 0.1], 0.3), 1.0, [0, 0, 1, 1]),  # pairs that are not adjacent too far apart
        (symmetric([0.125, 0.125, 0.125], 0.2), 0.25, [0, 0, 0, 1]),  # the sum of adjacent ones
        (symmetric([0.0, 0.0, 0.0], 0.0), 0.0, [0, 0, 0, 0]),
    ],
)
def test_layers_join_while_both_thresholds_hold(divergence, delta2, expected):
    for stream in ("keys", "values"):
        assert layer_groups("measured", stream, divergence, [0, 1, 2, 3], 0.2, delta2).tolist() == expected


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 12), delta1=st.floats(0, 0.7), delta2=st.floats(0, 3))
def test_measured_groups_keep_both_thresholds_and_none_could_take_the_next_layer(seed, layers, delta1, delta2):
    half = torch.rand(layers, layers, generator=torch.Generator().manual_seed(seed)).triu(1) * 0.7
    divergence = half + half.T
    groups = members(layer_groups("measured", "keys", divergence, list(range(layers)), delta1, delta2), range(layers))
    assert [layer for group in groups for layer in group] == list(range(layers))

    def holds(group):
        adjacent = sum(float(divergence[layer, layer + 1]) for layer in group[:-1])
        return adjacent <= delta2 and all(float(divergence[m, n]) <= delta1 for m in group for n in group)

    assert all(holds(group) for group in groups if len(group) > 1)
    assert not any(holds([*group, after[0]]) for group, after in itertools.pairwise(groups))


def test_the_papers_groups():
    divergence = torch.zeros(32, 32)
    keys = members(layer_groups("paper-32", "keys", divergence, range(32)), range(32))
    values = members(layer_groups("paper-32", "values", divergence, range(32)), range(32))
    assert [len(group) for group in keys] == [1, 1, 1, 3, 4, 4, 4, 4, 4, 4, 2]
    assert [len(group) for group in values] == [1, 1, 6, 6, 6, 6, 6]
    with pytest.raises(UsageError, match="paper-32' is for models of 32 layers, this one has 4: use 'measured'"):
        layer_groups("paper-32", "keys", torch.zeros(4, 4), range(4))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("layers", [0, 0, 0, 1, 1, 2]), ("measured", [0, 0, 0, 0, 0, 0])],
)
def test_layers_that_nothing_reached_stand_in_no_ones_way(kind, expected):
    reached = [1, 3, 5]
    divergence = divergences({layer: cloud(0) for layer in reached}, 6)
    groups = layer_groups(kind, "keys", divergence, reached)
    assert groups.tolist() == expected
    assert [layer for group in members(groups, reached) for layer in group] == reached


def test_a_paper_group_whose_first_layer_has_no_vectors():
    reached = [layer for layer in range(32) if layer not in (0, 3, 4, 31)]
    groups = layer_groups("paper-32", "keys", torch.zeros(32, 32), reached)
    assert members(groups, reached)[:4] == [[1], [2], [5], [6, 7, 8, 9]]
    assert groups.tolist()[:6] == [0, 0, 1, 1, 1, 2]
