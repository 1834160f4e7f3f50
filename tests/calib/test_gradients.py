"""Derivatives of log-probabilities by keys and values: against differences, independent of the batch, and what is refused."""

import pytest
import torch
from toy_language_model import toy_model
from transformers import DynamicCache

from calib.capture.gradients import derivatives, normalised, stream_gradients
from calib.capture.sample import SINKS
from calib.runtime.rotation import Rotation


@pytest.fixture(scope="module")
def model():
    return toy_model()


def batch(rows=2, tokens=40, padding=7):
    ids = torch.randint(3, 259, (rows, tokens), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :padding] = False
    return ids, mask, torch.arange(ids.numel()).view_as(ids)


def test_derivatives_are_what_a_small_change_of_the_cache_does(model):
    """Against differences through transformers' own cache, without any part of the capture."""
    ids = batch()[0][1:]
    # In float64, except norms, which the model computes in float32: so the differences must not be too small.
    pairs = derivatives(model.double(), ids, torch.arange(40)[None], iter([0.5] * 10).__next__)
    # The drawn tokens: a draw of 0.5 gives the median of each distribution.
    with torch.no_grad():
        said = model(ids).logits[0, 30:].double().softmax(-1)
    drawn = [int((row.cumsum(0) < 0.5 * row.sum()).sum()) for row in said]

    def answer(layer=None, stream=None, change=None):
        with torch.no_grad():
            cache = model(ids[:, :30], past_key_values=DynamicCache()).past_key_values
            if layer is not None:
                getattr(cache.layers[layer], stream).add_(change)
            found = model(ids[:, 30:], past_key_values=cache).logits[0].log_softmax(-1)
        return float(sum(row[token] for row, token in zip(found, drawn, strict=True)))

    try:
        # The last layer only: a change in another layer's cache would not reach the prompt's keys and values of later layers.
        exact, derived = pairs[-1]
        for stream in ("keys", "values"):
            g = getattr(derived, stream).double()
            assert not torch.equal(g, getattr(exact, stream).double())
            change = torch.randn(g[:, :, :30].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            slope = (answer(2, stream, 1e-3 * change) - answer(2, stream, -1e-3 * change)) / 2e-3
            assert float((g[:, :, :30] * change).sum()) == pytest.approx(slope, rel=3e-3)
    finally:
        model.float()
    assert derived.mask[0].tolist() == [SINKS <= t < 30 for t in range(40)]


def test_a_derivative_is_turned_as_its_key_is(model):
    """For a sequence from position 1000 on: derivatives by values are the same, those by keys are rotated by RoPE at 1000."""
    ids, index = batch()[0][1:], torch.arange(40)[None]
    rotation = Rotation.of(model, "")
    here, there = (derivatives(model, ids, index, iter([0.5] * 10).__next__, begin)[1][1] for begin in (0, 1000))
    assert torch.equal(here.mask, there.mask)
    torch.testing.assert_close(there.values, here.values, rtol=1e-3, atol=1e-4)
    rotated = Rotation.rotated(here.keys, *rotation.cos_sin([1000], here.keys.device))
    torch.testing.assert_close(there.keys, rotated, rtol=1e-3, atol=1e-4)
    assert (there.keys - here.keys).abs().max() > 1e-3


def test_every_sequence_weighs_the_same_and_is_alone(model):
    ids, mask, index = batch()
    found: list = []
    before = {name: (x.clone(), x.requires_grad, x.grad) for name, x in model.named_parameters()}
    assert stream_gradients(model, ids, mask, index, 0, found.append) == []
    assert [one.layer for one in found] == [0, 1, 2] * 2
    for name, x in model.named_parameters():
        assert torch.equal(x, before[name][0]) and x.requires_grad == before[name][1] and x.grad is None
    assert not model._modules["model"].config._attn_implementation.startswith("calib")
    # The padded row gives what its real tokens give alone.
    alone: list = []
    stream_gradients(model, ids[:1, 7:], mask[:1, 7:], index[:1, 7:], 0, alone.append)
    for one, other in zip(found[:3], alone, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)
    assert found[0].mask[0].tolist() == [SINKS <= t < 33 - 33 // 4 for t in range(33)]
    other_seed: list = []
    stream_gradients(model, ids, mask, index, 1, other_seed.append)
    assert not torch.equal(other_seed[0].keys, found[0].keys)  # other tokens were drawn

    pairs = derivatives(model, ids[1:], index[1:], iter([0.25] * 10).__next__)
    weight = 0.0
    for (exact, derived), one in zip(pairs, normalised(pairs), strict=True):
        for stream in ("keys", "values"):
            for head in range(2):
                x, g = (getattr(part, stream)[0, head, SINKS:30].double() for part in (exact, one))
                assert float((getattr(derived, stream)[0, head, SINKS:30] * g).sum()) > 0
                weight += sum(float(one @ torch.cov(x.T, correction=0) @ one) for one in g)
    assert weight == pytest.approx(1, rel=1e-4)


def test_what_cannot_be_differentiated_says_so_and_counts_for_nothing(model, monkeypatch):
    ids, mask, index = batch(padding=36)  # the first row has 4 real tokens: too few, left out without a reason
    found: list = []

    def refuse(*_, **__):
        raise NotImplementedError("derivative for aten::quantised is not implemented\nlong advice")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    (said,) = stream_gradients(model, ids, mask, index, 0, found.append)
    assert said == "LlamaForCausalLM has no backward pass here (derivative for aten::quantised is not implemented)"
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, by, **_: [x * torch.inf for x in by])
    (said,) = stream_gradients(model, ids, mask, index, 0, found.append)
    assert "in float32" in said and found == []


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_sixteen_bits_soft_caps_and_sliding_windows(kind):
    found: list = []
    model = toy_model(kind).to(torch.bfloat16)
    assert stream_gradients(model, *batch(tokens=64), 0, found.append) == []
    assert all(bool(one.keys.isfinite().all()) and bool(one.values.any()) for one in found)
