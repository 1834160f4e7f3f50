"""Each calibrator against its formula in float64, token by token, and the laws all of them share."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from toy_layer_sample import SHAPE, rows_of, sample

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.errors import RunError, UsageError
from calib.runtime.artifact.tensor_registry import TABLE
from calib.statistics.attention_error import Reference
from calib.statistics.balancer import Balancers
from calib.statistics.channel_range import ChannelRanges
from calib.statistics.channel_scale import ChannelScales
from calib.statistics.clip import ClipFactors
from calib.statistics.contract import check_shape
from calib.statistics.query_energy import QueryEnergy

pytestmark = pytest.mark.arithmetic

SIMPLE = {
    "channel_range": lambda: ChannelRanges(SHAPE),
    "channel_scale": lambda: ChannelScales(SHAPE),
    "balancer": lambda: Balancers(SHAPE),
    "query_energy": lambda: QueryEnergy(SHAPE),
}


def test_the_formulas_token_by_token():
    one = sample(padding=(0, 5))
    found = {}
    for make in SIMPLE.values():
        statistic = make()
        statistic.observe(one)
        found |= statistic.tensors()
    assert set(found) == {
        "keys.low", "keys.high", "values.low", "values.high", "values.scale", "keys.balancer", "queries.mean_square",
    }  # fmt: skip
    assert all(tensor.shape == (2, 2, 32) and tensor.dtype == torch.float32 for tensor in found.values())
    real = [(row, t) for row in range(2) for t in range(64) if bool(one.mask[row, t])]
    for head in range(2):
        for channel in (0, 7, 31):
            k = [one.keys[row, head, t, channel].item() for row, t in real]
            v = [one.values[row, head, t, channel].item() for row, t in real]
            q = [one.queries[row, 2 * head + g, t, channel].item() for row, t in real for g in (0, 1)]
            expected = {
                "keys.low": min(k),
                "keys.high": max(k),
                "values.low": min(v),
                "values.high": max(v),
                "values.scale": math.sqrt(max(map(abs, v))),
                "keys.balancer": math.sqrt(max(map(abs, q)) / max(map(abs, k))),
                "queries.mean_square": sum(x * x for x in q) / len(q),
            }
            for name, value in expected.items():
                assert found[name][0, head, channel].item() == pytest.approx(value, rel=1e-6), name


def test_what_is_measured_is_within_what_an_artifact_holds():
    """Channels of 1e-30: ranges, scales and balancers stay within the limits of the artifact's registry."""
    one = sample()
    one.keys[:, 0, :, 3] = 1e-30
    one.queries[:, 2:, :, 4] = 1e-30
    one.values[:, 1, :, 5] = 1e-30
    for name, make in SIMPLE.items():
        statistic = make()
        statistic.observe(one)
        for tensor, x in statistic.tensors().items():
            assert TABLE[tensor].least <= float(x.min()) and float(x.max()) <= TABLE[tensor].most, name


def test_dead_channels_and_layers_that_were_not_seen():
    one = sample()
    one.keys[:, 0, :, 3] = 0
    one.queries[:, 2:, :, 4] = 0
    one.values[:, 1, :, 5] = 0
    found = {}
    for make in SIMPLE.values():
        statistic = make()
        statistic.observe(one)
        found |= statistic.tensors()
    assert found["keys.balancer"][0, 0, 3] == 1
    assert (found["keys.balancer"][0, 1, 4]) == 1
    assert found["values.scale"][0, 1, 5] == 1
    assert torch.equal(found["values.scale"][1], torch.ones(2, 32))
    assert torch.equal(found["keys.balancer"][1], torch.ones(2, 32))
    for name in ("keys.low", "keys.high", "queries.mean_square"):
        assert torch.equal(found[name][1], torch.zeros(2, 32))
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())


def test_float16_near_its_limits_stays_finite():
    one = sample()
    large = LayerSample(
        0, *(x.clamp(-1, 1).mul(60_000).half() for x in (one.queries, one.keys, one.keys, one.values)),
        one.mask, one.positions, one.index, one.scaling,
    )  # fmt: skip
    for make in SIMPLE.values():
        statistic = make()
        statistic.observe(large)
        assert all(bool(tensor.isfinite().all()) for tensor in statistic.tensors().values())
    energy = QueryEnergy(SHAPE)
    energy.observe(large)
    assert energy.tensors()["queries.mean_square"].max() > 65504  # a float16 sum would be infinite


@pytest.mark.parametrize("name", SIMPLE)
@settings(max_examples=examples(10), deadline=None)
@given(cut=st.integers(1, 5), seed=st.integers(0, 3))
def test_parts_merge_into_the_whole(name, cut, seed):
    one = sample(batch=6, tokens=8, seed=seed, padding=(0, 3, 0, 7))
    whole, first, second = (SIMPLE[name]() for _ in range(3))
    whole.observe(one)
    first.observe(rows_of(one, slice(0, cut)))
    second.observe(rows_of(one, slice(cut, None)))
    first.merge(second)
    for key, tensor in whole.tensors().items():
        assert torch.equal(first.tensors()[key], tensor), key


@pytest.mark.parametrize("name", SIMPLE)
def test_padding_never_counts(name):
    one = sample(batch=2, padding=(0, 11))
    one.keys[1, :, :11] = one.queries[1, :, :11] = one.values[1, :, :11] = 1e6
    padded, parts = SIMPLE[name](), SIMPLE[name]()
    padded.observe(one)
    parts.observe(rows_of(one, slice(0, 1)))
    parts.observe(rows_of(one, slice(1, 2), slice(11, None)))
    for key, tensor in parts.tensors().items():
        torch.testing.assert_close(padded.tensors()[key], tensor, rtol=1e-6, atol=0)


def test_refusals():
    with pytest.raises(UsageError, match=r"model.bits=\[4, 2\]"):
        ClipFactors(SHAPE, bits=(4, 2))
    with pytest.raises(UsageError, match=r"model.clip_factors=\[0.9, 0.8\]"):
        ClipFactors(SHAPE, factors=(0.9, 0.8))
    with pytest.raises(RunError, match="too short: at least 32"):
        Reference.of(sample(tokens=31), 4)
    with pytest.raises(RunError, match="layer 0 has 4 query heads, 2 KV heads of 32"):
        check_shape(sample(), Shape(2, 4, 4, 32))
