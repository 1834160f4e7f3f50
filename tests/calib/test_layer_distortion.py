"""Errors and bit rates of a layer's pages, against the papers' formulas and the model's exact keys and values."""

import math
from functools import cache

import oracle
import pytest
import torch
from toy_distortion import LENGTH, SEQUENCES, column, figures, model, opened
from transformers import DynamicCache

from calib.capture.capture import stream
from calib.capture.sample import LayerSample
from calib.evaluate.feed import Feed
from calib.evaluate.layer_distortion import distances, layer_sums
from calib.evaluate.rate_distortion import decibels, least_bits, least_error
from calib.evaluate.stored import Stored, on_device, page_bits, stored
from calib.evaluate.tasks.distortion import told_positions
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits
from calib.runtime.offload.store import OffloadStore
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.ordered.stream import StreamPlan
from calib.runtime.stages.codec import UniformQuant
from calib.runtime.stages.schedule import SlidingResidual
from calib.runtime.stages.transform import Identity
from calib.runtime.store import LayerContext
from calib.runtime.tiered.store import TieredStore

# Tolerance in decibels: both sides sum the same squares in float64, but decode tokens in float32 or float64.
DECIBELS = 1e-3


@cache
def given():
    """Return each layer's exact queries `[heads, tokens of all rows, D]`, keys and values `[rows, kv_heads, T, D]`, in float64."""
    tokens = column().sequences.tokens
    with torch.no_grad():
        exact = model()(tokens, past_key_values=DynamicCache(config=model().config)).past_key_values
    queries = {}
    stream(
        model(),
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        torch.arange(tokens.numel()).view(tokens.shape),
        lambda sample: queries.update({sample.layer: sample.queries.double().transpose(0, 1).flatten(1, 2)}),
    )
    layers = enumerate(exact.layers)
    return [(queries[number], layer.keys.double(), layer.values.double()) for number, layer in layers]


def errors(name):
    """Return each layer's decoded minus exact keys and values, float64 `[kv_heads, tokens of all rows, D]`."""
    with opened(name) as opened_cache:
        Feed(model(), opened_cache)(column().sequences.tokens)
        found = []
        for layer, (_, *streams) in zip(opened_cache.compressed, given(), strict=True):
            store = layer.store.low if isinstance(layer.store, OffloadStore) else layer.store
            of_layer = ([], [])
            for row in range(SEQUENCES):
                held = oracle.held_by(store, row)
                for number, (part, exact) in enumerate(zip(held[:2], streams, strict=True)):
                    if isinstance(store, TieredStore):
                        count = sum(store.counts(row))
                    else:
                        count = store.streams[number].plan.schedule.packed(LENGTH)
                    positions = torch.arange(count).expand(part.shape[0], -1)
                    positions = positions if held.positions is None else held.positions[:, :count]
                    own = exact[row].gather(1, positions[..., None].expand(*positions.shape, part.shape[2]))
                    of_layer[number].append(part[:, :count] - own)
            found.append([torch.cat(parts, 1) for parts in of_layer])
        return found


@pytest.mark.parametrize(
    "name",
    ["rtn-2", "kivi-3-short", "kivi-2-fine", "rtn-4-calibrated", "mikv-8-2", "gear", "gear-kivi", "specache", "csr-offline"],
)  # fmt: skip
def test_errors_are_those_of_the_pages(name):
    found = figures(name)
    for layer, ((queries, keys, values), (key_error, value_error)) in enumerate(
        zip(given(), errors(name), strict=True)
    ):
        own = queries.unflatten(0, (keys.shape[1], -1)).flatten(1, 2)
        asked = [(own @ x.mT).square().mean() for x in (key_error, keys.transpose(0, 1).flatten(1, 2))]
        expected = {
            "keys": key_error.square().mean() / keys.square().mean(),
            "values": value_error.square().mean() / values.square().mean(),
            "logits": asked[0] / asked[1],
        }
        for kind, ratio in expected.items():
            assert found[f"{kind} error layer {layer}"] == pytest.approx(10 * math.log10(ratio), abs=DECIBELS)
    assert found["kept"] == 1 and found["sequences"] == SEQUENCES and found["tokens"] == SEQUENCES * LENGTH
    encoded = [part.shape[1] / SEQUENCES / LENGTH for layer in errors(name) for part in layer]
    assert found["encoded"] == pytest.approx(sum(encoded) / len(encoded))


@pytest.mark.parametrize("name", ["rtn-2", "kivi-3-short", "zipcache", "gear"])
def test_bounds_are_those_of_the_texts_covariance(name):
    found = figures(name)
    for layer, (queries, keys, values) in enumerate(given()):
        flat = {"keys": keys.transpose(0, 1).flatten(1, 2), "values": values.transpose(0, 1).flatten(1, 2)}
        for kind, role in (("keys", "keys"), ("logits", "keys"), ("values", "values")):
            x = flat[role]
            covariance = torch.stack([torch.cov(own.T, correction=0) for own in x])
            energy = float(x.square().mean())
            if kind == "logits":
                group = queries.unflatten(0, (len(x), -1)).flatten(1, 2)
                weight = group.mT @ group / group.shape[1]
                energy = float((weight * (x.mT @ x / x.shape[1])).sum()) / x.shape[0] / x.shape[2]
                variances = torch.linalg.eigvals(weight @ covariance).real.clamp(min=0).flatten()
            else:
                variances = torch.linalg.svdvals(covariance).flatten()
            rate = found[f"{role} bits layer {layer}"]
            bound = decibels(least_error(variances, rate) / energy)
            assert found[f"{kind} bound layer {layer}"] == pytest.approx(bound, abs=DECIBELS)
            error = 10 ** (found[f"{kind} error layer {layer}"] / 10) * energy
            excess = rate - least_bits(variances, error)
            assert found[f"{kind} excess layer {layer}"] == pytest.approx(excess, abs=DECIBELS)
            distance = found[f"{kind} error layer {layer}"] - found[f"{kind} bound layer {layer}"]
            assert found[f"{kind} distance layer {layer}"] == pytest.approx(distance, abs=1e-9)
    for kind in ("keys", "logits", "values"):
        for name in ("distance", "excess"):
            each = [found[f"{kind} {name} layer {layer}"] for layer in range(len(given()))]
            assert found[f"{kind} {name}"] == pytest.approx(sum(each) / len(each))
    assert found["distance"] == pytest.approx((found["keys distance"] + found["values distance"]) / 2)


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        # Codes, and of a group of 32 values a scale and a zero point of 16 bits each; of a token's 32 channels the same.
        ("rtn-2", 3.0, 3.0),
        ("kivi-2-calibrated", 2.0, 3.0),
        ("full", 32.0, 32.0),
        # 26 tokens of 128 have 8 bits, the others 2, all in two groups of 16 channels; half of a position of 32 bits.
        ("mikv-8-2", 2 + 2 + (26 * 6) / 128 + 0.5, 2 + 2 + (26 * 6) / 128 + 0.5),
        # One scale and one zero point for 128 tokens of two heads.
        ("uniform", 4 + 32 / 128 / 64, 4 + 32 / 128 / 64),
        # 8 coefficients of 4 bits and indices of 7 (96 atoms), and a scale, for 32 channels.
        ("csr-offline", 3.25, 3.25),
    ],
)
def test_rates_are_what_is_documented(name, keys, values):
    found = figures(name)
    assert found["keys bits layer 1"] == pytest.approx(keys, abs=1e-9)
    assert found["values bits layer 1"] == pytest.approx(values, abs=1e-9)


KINDS = ("codes", "parameters", "outliers", "low_rank", "residual", "dictionary", "exact", "positions")


@pytest.mark.parametrize(
    "name", ["full", "rtn-4", "zipcache-half", "mikv-half", "gear", "gear-paper", "csr-paper", "rtn-twice"]
)
def test_rates_are_what_the_cache_weighs_where_pages_are_full(name):
    with opened(name) as opened_cache:
        Feed(model(), opened_cache)(column().sequences.tokens)
        kinds = opened_cache.memory().by_kind
        each = [page_bits(on_device(layer.store), row) for layer in opened_cache.compressed for row in range(SEQUENCES)]
    assert sum(map(sum, (found.values() for found in each))) == 8 * sum(kinds[kind] for kind in KINDS)


@pytest.mark.arithmetic
def test_a_group_of_which_some_tokens_are_still_read_exactly():
    """Of 50 tokens 32 are encoded; as 32 are exact, 18 are read from pages: four and a half groups of 4."""
    codec = UniformQuant(2, (4, 1))
    plan = LayerPlan(
        StreamPlan(Identity(), codec, SlidingResidual(32)), StreamPlan(Identity(), codec, SlidingResidual(32))
    )
    layer = CompressedLayer(plan, plan.sequences(1, None), LayerContext())
    query, keys, values = torch.randn(3, 1, 2, 50, 8, generator=torch.Generator().manual_seed(0)).unbind()
    layer.update(keys, values)
    layer.attend(query, None, Logits(1.0))
    for given, found in zip((keys, values), stored(layer.store, 0).values(), strict=True):
        assert torch.equal(found.tokens, codec.decode(codec.encode(given[:, :, :32]), 8)[0, :, :18])
        assert torch.equal(found.positions, torch.arange(18).expand(2, -1))
    # Codes of 8 channels are one word a token; 5 groups have a scale and a zero point of 16 bits for each channel.
    assert page_bits(layer.store, 0) == dict.fromkeys(("keys", "values"), 2 * (18 * 16 + 5 * 8 * 32))


@pytest.mark.parametrize("name", ["zipcache", "csr-tiers", "mikv-8-2", "rtn-4", "specache"])
def test_measuring_leaves_the_cache_what_it_was(name):
    batch, own = column().batches()[0], []
    for forward in (lambda of: Feed(model(), of)(batch), lambda of: column().measure(of, batch)):
        with opened(name) as opened_cache:
            forward(opened_cache)
            own.append(opened_cache.memory())
    assert own[0] == own[1]


@pytest.mark.parametrize("name", ["zipcache", "zipcache-16-4-2", "zipcache-corrected"])
def test_tiers_are_told_apart_by_a_copy_that_keeps_positions(name):
    batch = column().batches()[0]
    with opened(name) as opened_cache:
        Feed(model(), opened_cache)(batch)
        told = told_positions(opened_cache)
        with told:
            Feed(model(), told)(batch)
    assert told is not opened_cache
    for mine, other in zip(opened_cache.compressed, told.compressed, strict=True):
        for row in range(len(batch)):
            pairs = zip(mine.store.decoded(row), other.store.decoded(row), strict=True)
            assert all(torch.equal(*both) for pair in pairs for both in zip(*pair, strict=True))
            positions = stored(other.store, row)["keys"].positions
            assert all(own.unique().numel() == own.numel() == LENGTH for own in positions)


GAUSSIAN = {1: (1.596, 0.3634), 2: (0.9957, 0.1188), 3: (0.586, 0.03744), 4: (0.3352, 0.01154)}


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_a_gaussian_in_optimal_uniform_steps(bits):
    """Steps and errors of Max (1960), in sigma: at 4 bits the error is 256 x 0.01154 of the bound, 4.70 dB."""
    (step, error), heads, tokens, channels = GAUSSIAN[bits], 2, 40_000, 4
    draw = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, n, tokens, channels, generator=draw) for n in (4, heads, heads))
    shift = torch.tensor([3.0, -8.0])[
        :, None, None
    ]  # the bound knows the mean, so it changes only what errors are relative to
    held, levels = [], 2**bits
    for row in range(2):
        positions = torch.stack([torch.randperm(tokens, generator=draw) for _ in range(heads)])
        found = {}
        for role, x in (("keys", keys[row]), ("values", values[row])):
            coded = ((x / step + levels / 2).floor().clamp(0, levels - 1) - levels / 2 + 0.5) * step + shift
            found[role] = Stored(coded.gather(1, positions[..., None].expand(coded.shape)), positions)
        held.append(found)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    sample = LayerSample(0, queries, keys + shift, None, values + shift, mask, mask.long(), mask.long(), 1.0)
    size = 2.0 * bits * 2 * heads * tokens * channels / 2
    found = dict(distances(layer_sums(sample, held, {"keys": size, "values": size}, 2.0)))
    assert set(found) == {"keys", "logits", "values"}
    for kind, of in found.items():
        relative = 1 if kind == "logits" else 1 + (9 + 64) / 2
        assert of.distance == pytest.approx(decibels(error * 4**bits), abs=0.03)
        assert of.excess == pytest.approx(math.log2(error * 4**bits) / 2, abs=0.005)
        if kind != "logits":
            assert of.error == pytest.approx(decibels(error / relative), abs=0.03)
