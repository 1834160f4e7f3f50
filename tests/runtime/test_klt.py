"""The method `klt`: what it keeps of keys and values, its budgets, and what it refuses."""

import math
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import calibrated_artifact
from layer_walk import Tokens, feed
from oracle import rotated
from rope_types import ROPE_TYPES
from toy_models import random_model
from transformers import DynamicCache

from calib.runtime import Artifact, compress
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.artifact.components import (
    TRELLIS_ERRORS,
    Coding,
    allocator,
    error_at,
    interpolated,
    layer_codes,
    loss_at,
    stem_of,
)
from calib.runtime.methods.klt import Klt
from calib.runtime.stages.codec import MixedQuant, TrellisQuant

pytestmark = pytest.mark.arithmetic


@pytest.fixture(scope="module")
def model():
    return random_model("llama", torch.bfloat16)


@pytest.fixture(scope="module")
def artifact(model):
    return calibrated_artifact(model)


def reconstructed(artifact, stem, layer, words, x):
    """x^ of `x [kv_heads, T, D]`, float64, by the formulas: components, rounded with each one's step, and transformed back."""
    mean, basis, steps = (artifact.tensor(f"{stem}.{name}")[layer].double() for name in ("mean", "basis", "steps"))
    found = torch.empty_like(x)
    for head in range(len(x)):
        y = (x[head] - mean[head]) @ basis[head].T
        kept = torch.zeros_like(y)
        for component, bits in enumerate(words.bits_of(head)[: y.shape[1]]):
            step, last = steps[head, component, bits - 1], 2**bits - 1
            code = (y[:, component] / step + last / 2).round().clamp(0, last)
            kept[:, component] = (code - last / 2) * step
        found[head] = kept @ torch.linalg.inv(basis[head]).T + mean[head]
    return found


@pytest.mark.parametrize(
    ("rope", "rope_type"), [("before", "default"), ("after", "default"), ("before", "yarn"), ("before", "linear")]
)
def test_it_holds_what_the_formulas_say(rope, rope_type):
    model = random_model("llama", torch.bfloat16, rope_parameters=ROPE_TYPES[rope_type].parameters)
    artifact, frequencies = calibrated_artifact(model), model.model.rotary_emb.inv_freq.double()
    cache = compress(model, "klt", artifact=artifact, bits=2.5, rope=rope, size=False, window=0, block=10, sinks=3)
    cache.release()
    tokens = Tokens.random(model, 203, seed=1)
    feed(cache, [tokens])
    allocation = Klt(bits=2.5, rope=rope, size=False).allocations(artifact)[0]
    positions = torch.arange(3, 203, dtype=torch.float64)[:, None]
    for number, layer in enumerate(cache.compressed):
        for role, given, own in zip(ROLES, (tokens.keys, tokens.values), layer.store.decoded(0)[0], strict=True):
            turned = frequencies if role == "keys" and rope == "before" else torch.zeros(1)
            words, x = allocation.streams[role][number], rotated(given[number][:, 3:].double(), turned, -positions)
            wanted = rotated(reconstructed(artifact, stem_of(role, rope), number, words, x), turned, positions)
            error = (own.double() - wanted).abs()
            # With tables of 16 bits some components near the border of two codes are rounded to the other one.
            assert float(error.median()) < 2e-3 and float((error > 0.02).double().mean()) < 0.02


def sized_codes(rows, steps, deviation, words, head, x):
    """The decoded components `[T, components]` of `x [T, D]`, float64, less its mean: codes of y / s, times the token's size s."""
    y = x @ rows[head].T
    bits = words.bits_of(head)[: y.shape[1]]
    y, scale = y[:, : len(bits)], deviation[head, : len(bits)]
    octave = (2 * (y / scale).square().mean(-1).sqrt().log2()).round().clamp(-5, 10)
    size = torch.exp2(octave / 2)
    found = torch.empty_like(y)
    for component, width in enumerate(bits):
        step, last = steps[head, component, width - 1], 2**width - 1
        code = (y[:, component] / size / step + last / 2).round().clamp(0, last)
        found[:, component] = (code - last / 2) * step * size
    return found


@pytest.mark.parametrize("predict", [False, True])
def test_sizes_and_predictions_hold_what_the_formulas_say(model, artifact, predict):
    """Codes are of y / s, s the token's size to the nearest half octave; with `predict` y of values is of the residual after M
    times the decoded key before RoPE."""
    coded = {"bits": 2.5, "size": True, "predict": predict, "trellis": False}
    cache = compress(model, "klt", artifact=artifact, **coded, window=0, block=10, sinks=3)
    cache.release()
    tokens = Tokens.random(model, 203, seed=1)
    for token in range(0, 203, 17):
        tokens.keys[..., token, :] *= 5  # some tokens have much larger norms
        tokens.values[..., token, :] *= 4
    feed(cache, [tokens])
    allocation = Klt(**coded).allocations(artifact)[0]
    positions = torch.arange(3, 203, dtype=torch.float64)[:, None]
    for number, layer in enumerate(cache.compressed):
        frequencies = layer.store.context.rotation.frequencies
        held = dict(zip(ROLES, layer.store.decoded(0)[0], strict=True))
        coding, keys = Coding("before", True, predict), {}
        for role, given in zip(ROLES, (tokens.keys, tokens.values), strict=True):
            mean, rows, steps, errors = (
                artifact.tensor(coding.name(role, kind))[number].double()
                for kind in ("mean", "basis", "steps", "errors")
            )
            x = given[number][:, 3:].double()
            x = rotated(x, frequencies, -positions) if role == "keys" else x
            for head in range(len(x)):
                known = mean[head].expand_as(x[head])
                if role == "values" and predict:
                    matrix = artifact.tensor("values.klt.predicted.matrix")[number, head].double()
                    known = known + keys[head] @ matrix.T
                words = allocation.streams[role][number]
                codes = sized_codes(rows, steps, errors[..., 0].sqrt(), words, head, x[head] - known)
                moved = codes @ torch.linalg.inv(rows[head])[:, : codes.shape[1]].T
                if role == "keys":
                    keys[head] = moved
                wanted = known + moved
                wanted = rotated(wanted, frequencies, positions) if role == "keys" else wanted
                error = (held[role][head].double() - wanted).abs()
                # With tables of 16 bits a component or a size near the border of two codes may be rounded to the other one.
                assert float(error.median()) < 3e-3 and float((error > 0.05).double().mean()) < 0.03


@pytest.mark.parametrize("trellis", [False, True])
@pytest.mark.parametrize("corrections", [None, {"outliers": 0.1}, {"residual_bits": 2}], ids=str)
def test_attention_meets_predicted_values_as_they_decode(corrections, trellis):
    """A step after the cache has the logits of a step after a DynamicCache with the cache's decoded tokens. Corrections are of the
    residual of values."""
    model, ids = random_model("llama"), torch.randint(3, 60, (1, 140), generator=torch.Generator().manual_seed(4))
    options = {
        "bits": 3,
        "size": True,
        "predict": True,
        "trellis": trellis,
        "window": 0,
        "sinks": 0,
        "block": 20,
        "corrections": corrections,
    }
    with torch.no_grad(), compress(model, "klt", artifact=calibrated_artifact(model), **options) as cache:
        model(ids, past_key_values=cache)
        decoded = DynamicCache(config=model.config)
        for number, layer in enumerate(cache.compressed):
            keys, values = layer.store.decoded(0)[0]
            decoded.update(keys[None], values[None], number)
        found = model(ids[:, -1:], past_key_values=cache).logits
    with torch.no_grad():
        wanted = model(ids[:, -1:], past_key_values=decoded).logits
    assert float((found - wanted).abs().max()) < 2e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("coding", [{}, {"rope": "after"}, {"size": True}], ids=str)
def test_trellis_levels_are_nearer(artifact, coding):
    """Tokens are drawn with the artifact's variances of components. With as many words a trellis has less than 0.9 of the error,
    of the components that have bits."""
    draw, errors = torch.Generator().manual_seed(2), {True: 0.0, False: 0.0}
    found = Coding(coding.get("rope", "before"), coding.get("size", False))
    for layer, role in product(range(2), ROLES):
        mean, rows, variance = (
            artifact.tensor(found.name(role, kind))[layer].double() for kind in ("mean", "basis", "errors")
        )
        y = variance[..., 0].sqrt()[:, None] * torch.randn(*mean.shape[:1], 300, *mean.shape[1:], generator=draw)
        x = (mean[:, None] + y @ torch.linalg.inv(rows).mT).float()[None]
        words = Klt(bits=2, **coding).allocations(artifact)[0].streams[role][layer]
        for trellis in errors:
            codes = layer_codes(artifact, role, layer, words, replace(found, trellis=trellis))
            block = codes.codec.encode(codes.basis.forward(x))
            held = codes.basis.inverse(codes.codec.decode(block, codes.basis.components))
            missed = ((held - x)[0].double() @ rows.mT).square().sum(1)
            for head, own in enumerate(missed):
                errors[trellis] += float(own[: len(words.bits_of(head))].sum())
    assert errors[True] < 0.9 * errors[False]


@pytest.mark.parametrize(("bits", "step"), [(1, 1.596), (2, 0.9957), (4, 0.3352)])
def test_what_a_trellis_leaves_of_an_error(bits, step):
    """TRELLIS_ERRORS, by which a budget's bits are allocated: a trellis' mean squared error of Gaussian components, relative to
    that of Max's uniform quantiser."""
    y = torch.randn(1, 1, 4000, 64, generator=torch.Generator().manual_seed(5))
    widths = (bits,) * (16 // bits)
    counts = (64 // len(widths),)
    left = {}
    for codec in (MixedQuant(widths, counts), TrellisQuant(widths, counts, torch.ones(1, 1, 64))):
        reach = step * 2 ** (bits - 1)
        left[type(codec)] = float((codec.decode(codec.encode(y / reach), 64) * reach - y).square().mean())
    assert left[TrellisQuant] / left[MixedQuant] == pytest.approx(TRELLIS_ERRORS[bits], rel=0.02)


@pytest.mark.parametrize("bits", [0.75, 2, 4])
def test_a_budget_is_what_a_token_takes(model, artifact, bits):
    sized = {"size": True, "predict": True}
    for coding in (
        {"size": False},
        {"size": True, "predict": False},
        {**sized, "trellis": False},
        {"trellis": True},
        sized,
    ):
        cache = compress(model, "klt", artifact=artifact, bits=bits, **coding)
        cache.release()
        feed(cache, [Tokens.random(model, 150, seed=2)])
        assert cache.memory().marginal_bits == bits


@pytest.mark.parametrize(
    "coding",
    [
        {"size": False},
        {"size": True, "predict": False},
        {"size": True, "predict": True, "trellis": False},
        {"size": True, "predict": True, "trellis": True},
    ],
    ids=str,
)
def test_a_budget_in_bytes_holds_and_is_used(model, artifact, coding):
    context, batch, budget = 700, 2, 200_000
    cache = compress(model, "klt", artifact=artifact, bytes=budget, context=context, batch=batch, window=16, **coding)
    cache.release()
    feed(cache, [Tokens.random(model, context, seed=row) for row in range(batch)])
    memory = cache.memory()
    assert 0.9 * budget < memory.measured_bytes == memory.predicted_bytes <= budget


def test_a_budget_in_bytes_holds_at_every_token_of_a_growing_text(model, artifact):
    """A full pool allocates a sixteenth of its pages ahead, for which the budget leaves room."""
    context, start, budget = 2100, 2060, 150_000
    cache = compress(model, "klt", artifact=artifact, bytes=budget, context=context, window=16)
    cache.release()
    row = Tokens.random(model, context, seed=3)
    feed(cache, [row[:start]])
    found = []
    for token in range(start, context):
        feed(cache, [row[token : token + 1]])
        found.append(cache.memory().measured_bytes)
    assert min(found) < 0.98 * max(found)  # it took pages
    assert 0.9 * budget < max(found) <= budget


def test_a_budget_in_bytes_includes_the_numbers_of_pages(model, artifact):
    """Pages of rows that grow side by side are not consecutive, so the device has a table of their numbers."""
    context, start = 300, 260
    method = Klt(bytes=10**7, context=context, batch=2, sinks=7, window=64, block=1, size=False)
    coding = method.coding(artifact)
    (allocation,) = method.allocations(artifact, coding)
    assert allocation.bits == 8
    most = method.bytes_of(allocation, coding, *artifact.tensor("keys.klt.mean").shape, growing=True)
    cache = compress(model, "klt", artifact=artifact, bits=8, sinks=7, window=64, block=1, size=False)
    cache.release()
    rows = [Tokens.random(model, context, seed=row) for row in range(2)]
    feed(cache, [row[:start] for row in rows])
    for token in range(start, context):
        feed(cache, [row[token : token + 1] for row in rows])
        assert cache.memory().measured_bytes <= most


@pytest.mark.parametrize("rope", ["before", "after"])
@pytest.mark.parametrize("context", [40, 300])
def test_bytes_are_those_of_the_cache(model, artifact, rope, context):
    """Counted are also each head's tables, and the window's whole memory if the context is short."""
    method = Klt(bytes=10**7, context=context, rope=rope)
    coding = method.coding(artifact)
    (allocation,) = method.allocations(artifact, coding)
    cache = compress(model, "klt", artifact=artifact, bits=8, rope=rope)
    cache.release()
    feed(cache, [Tokens.random(model, context, seed=2)])
    counted = method.bytes_of(allocation, coding, *artifact.tensor("keys.klt.mean").shape)
    assert cache.memory().measured_bytes == counted


def test_a_budget_in_loss_is_read_off_the_curve(artifact):
    """The curve of the toy artifact: an error of .01 costs .004 nats; of keys after RoPE three times as much."""
    assert error_at(artifact, 0.004) == pytest.approx(0.01) and loss_at(artifact, 0.01) == pytest.approx(0.004)
    between = error_at(artifact, 0.04)
    slope = math.log(0.5 / 0.01) / math.log(0.3 / 0.004)
    assert between == pytest.approx(0.01 * (0.04 / 0.004) ** slope)
    assert error_at(artifact, 0.012, Coding("after")) == pytest.approx(0.01) and loss_at(
        artifact, 0.01, Coding("after")
    ) == pytest.approx(0.012)
    found = Klt(loss=0.3).allocations(artifact)[0]
    assert found.error <= 0.5
    assert found.bits < allocator(artifact).at_bits(8).bits


def test_between_points_of_a_curve():
    """Interpolation is linear; points with the same x, which losses may have, cause no division by zero."""
    x, y = torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])
    assert [interpolated(x, y, at) for at in (1.0, 1.5, 2.0, 3.0)] == [20.0, 25.0, 30.0, 40.0]
    assert interpolated(x[1:3], y[1:3], 0.0) == 10.0


def test_a_salient_token_has_more_bits(model, artifact):
    plan = Klt(tiers=[(4, 0.2), (1, 0.8)], block=20, size=False).plan(0, None, artifact)
    best, rest = (tier.keys.codec.counts for tier in plan.tiers)
    assert sum(best) > 2 * sum(rest) and plan.saliency is not None


@pytest.mark.parametrize(("rope", "most"), [("after", 0.5), ("before", 0.6)])
def test_outliers_of_components_are_kept(model, artifact, rope, most):
    """Some tokens are far outside every range: with outliers their error falls, and that of all other tokens does not rise."""
    tokens = Tokens.random(model, 143, seed=3)
    for part in (tokens.keys, tokens.values):
        part[:, :, 7::20] *= 30
    errors = []
    for corrections in (None, {"outliers": 0.4}):
        options = {"rope": rope, "size": False, "sinks": 0, "window": 0, "block": 20, "corrections": corrections}
        cache = compress(model, "klt", artifact=artifact, bits=2, **options)
        cache.release()
        feed(cache, [tokens])
        tiers = cache.compressed[0].store.decoded(0)
        held = torch.cat([keys for keys, _ in tiers], 1)
        errors.append((held - tokens.keys[0][:, : held.shape[1]].float()).square().sum((0, 2)))
    far = torch.arange(len(errors[0])) % 20 == 7
    assert float(errors[1][far].sum()) < most * float(errors[0][far].sum())
    assert float(errors[1][~far].sum()) <= float(errors[0][~far].sum())


def test_a_bias_of_the_keys_leaves_no_trace_before_rope(model, artifact):
    """A constant added to every key before RoPE, and to the mean that was measured, leaves all but 0.1 % of words the same."""
    shift = torch.randn(
        artifact.tensor("keys.klt.before.mean").shape, generator=torch.Generator().manual_seed(4)
    ).round()
    tensors = dict(artifact.tensors)
    tensors["keys.klt.before.mean"] = tensors["keys.klt.before.mean"] + shift
    shifted = Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)
    plans = [Klt(rope="before").plan(1, None, one) for one in (artifact, shifted)]
    keys = (
        torch.randn(1, shift.shape[1], 40, shift.shape[2], generator=torch.Generator().manual_seed(5))
        .bfloat16()
        .float()
    )
    codes = [
        stages.codec.encode(stages.transform.forward(x))["words"]
        for stages, x in zip([plan.tiers[0].keys for plan in plans], (keys, keys + shift[1][:, None]), strict=True)
    ]
    assert (codes[0] == codes[1]).double().mean() > 0.999


def test_positions_beyond_those_that_were_measured_are_told(model, artifact):
    """Beyond the fit's `length`, or the `positions` its sequences were spread over. Keys before RoPE do not depend on positions."""

    def told(data, rope, tokens):
        provenance = {**artifact.provenance, "data": data}
        one = Artifact(artifact.tensors, artifact.fingerprint, provenance, artifact.clip_bits)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            feed(compress(model, "klt", artifact=one, rope=rope, window=0), [Tokens.random(model, tokens, seed=3)])
        return {str(one.message) for one in found}

    (line,) = told({"length": 64}, "after", 100)
    assert line == (
        "keys are encoded beyond position 64, the last that the fit measured, with large errors; "
        "fit with --data.positions, or use rope='before'"
    )
    assert told({"length": 64, "positions": 100}, "after", 101) and not told({"length": 64}, "before", 100)
    assert not told({"length": 64}, "after", 64) and not told({"length": 64, "positions": 100}, "after", 100)
    assert not told({}, "after", 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits must be a number above 0, got 0"),
        ({"bits": True}, "bits must be a number above 0, got True"),
        ({"bits": 9, "size": False}, r"bits must be a number from 0.25 \(a word a layer\) to 8, got 9"),
        ({"bits": 2, "loss": 0.1}, "bits and loss are both budgets; give one of them"),
        ({"loss": 9.0}, "loss=9 is outside what the fit measured, 0.0005 ... 0.3 nats a token"),
        ({"bytes": 10**6}, "bytes=1000000 and context=None: a budget in bytes is for a context of so many tokens"),
        ({"bytes": 100, "context": 1000}, "bytes=100 is less than 1 x 1000 tokens take at 0.25 bits"),
        ({"sinks": -1}, "sinks must be a whole number from 0, got -1"),
        ({"size": "yes"}, "size must be True or False, got 'yes'"),
        ({"size": True, "predict": 1}, "predict must be True or False, got 1"),
        ({"size": False, "predict": True}, "predict=True with size=False"),
        ({"predict": True, "rope": "after"}, "predict=True with rope='after': the fit measures sizes only for"),
        (
            {"size": True, "rope": "after"},
            "size=True with rope='after': the fit measures sizes only for keys before RoPE",
        ),
        (
            {"size": True, "loss": 0.01},
            "loss with size, predict or trellis: the fit measured losses without them; give a budget in bits",
        ),
        ({"trellis": True, "loss": 0.01}, "loss with size, predict or trellis"),
        ({"trellis": 1}, "trellis must be True or False, got 1"),
        ({"size": True, "bits": 0.3}, r"bits must be a number from 0.375 \(a word a layer\) to 8, got 0.3"),
        ({"rope": "during"}, "rope must be one of before, after, got 'during'"),
        ({"tiers": [[1, 0.5], [2, 0.5]]}, "each of tiers must have fewer bits than the one before"),
        ({"tiers": [[2, 0.5], [1, 0.4]]}, "shares of tiers must add up to 1"),
        ({"tiers": [[2, 0.5], [1, 0.5]], "window": 8}, "window=8 with tiers"),
        (
            {"rope": "after", "corrections": {"outliers": 0.02, "statistics": "calibrated"}},
            "components of a basis; use statistics='prompt'",
        ),
    ],
)
def test_what_it_refuses(model, artifact, options, message):
    with pytest.raises(ValueError, match=message):
        compress(model, "klt", artifact=artifact, **options)


def test_it_needs_an_artifact_with_bases(model, artifact):
    with pytest.raises(ValueError, match="method 'klt' needs calibrated bases: pass artifact="):
        compress(model, "klt")
    bare = {name: tensor for name, tensor in artifact.tensors.items() if ".klt" not in name}
    with pytest.raises(ValueError, match=r"needs tensor 'keys\.klt\.errors', which is not in this artifact"):
        compress(model, "klt", artifact=Artifact(bare, artifact.fingerprint, artifact.provenance, artifact.clip_bits))


@pytest.mark.parametrize(
    ("options", "without", "form"),
    [
        ({"bits": 4}, None, (True, True)),
        ({"bits": 4}, "predicted", (True, False)),
        ({"bits": 4}, "klt.sized", (False, False)),
        ({"bits": 4}, "klt.before", (False, False)),
        ({"bits": 4, "predict": False}, None, (True, False)),
        ({"bits": 4, "size": False}, None, (False, False)),
        ({"predict": True}, "klt.sized", (True, True)),  # the error then names what is missing
        ({"bits": 4, "rope": "after"}, None, (False, False)),
        ({"loss": 0.01}, None, (False, False)),
        # With these heads sizes take an eighth of a bit per value, and a budget below 0.375 bits has no room for them.
        ({"bits": 1}, None, (True, True)),
        ({"bits": 0.5}, None, (False, False)),
        ({"bits": 0.5, "size": True}, None, (True, True)),
        ({"bits": 0.4}, None, (False, False)),
        ({"tiers": [(4, 0.5), (0.5, 0.5)]}, None, (False, False)),
        ({"tiers": [(4, 0.5), (1, 0.5)]}, None, (True, True)),
        ({"bytes": 4_000_000, "context": 8192}, None, (True, True)),
        ({"bytes": 200_000, "context": 8192}, None, (False, False)),
    ],
)
def test_sizes_and_predictions_are_used_where_they_lower_the_predicted_error(artifact, options, without, form):
    tensors = {name: tensor for name, tensor in artifact.tensors.items() if not without or without not in name}
    for name in ("keys.klt.sized.errors", "values.klt.sized.errors", "values.klt.predicted.errors"):
        if name in tensors:  # a random model's tokens differ little in size, so that sizes raise the error
            tensors[name] = 0.65 * tensors[name]
    known = Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)
    coding = Klt(**options).coding(known)
    # Levels are trellis-coded where values are predicted.
    assert (coding.size, coding.predict, coding.trellis) == (*form, form[1])
    assert not Klt(trellis=False, **options).coding(known).trellis


@pytest.mark.parametrize(
    ("options", "without", "told"),
    [
        ({}, "klt.sized", "no tensors 'keys.klt.sized.*', so klt codes components without sizes"),
        ({"size": False}, "klt.sized", None),
        ({"loss": 0.3}, "klt.sized", None),  # which is without sizes in any case
        ({}, "klt.predicted", "no tensors 'values.klt.predicted.*', so klt predicts no values"),
        ({"predict": False}, "klt.predicted", None),
        ({}, "klt.before", None),
        ({}, None, None),
    ],
)
def test_an_artifact_without_sizes_or_predictions_is_told_of_once(model, artifact, options, without, told):
    tensors = {name: tensor for name, tensor in artifact.tensors.items() if not without or without not in name}
    known = Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            compress(model, "klt", artifact=known, **options).release()
    messages = [str(one.message) for one in found if "the artifact has no tensors" in str(one.message)]
    assert len(messages) == (told is not None)
    assert all(told in message and "calib fit" in message for message in messages)


def test_of_random_tokens_sizes_raise_the_predicted_error(artifact):
    """Sizes raise it by more than a trellis lowers it at few bits, and by less at many."""
    assert Klt(bits=4, trellis=False).coding(artifact) == Coding("before")
    assert Klt(bits=4).coding(artifact) == Coding("before", True, True, True)
    assert Klt(bits=1).coding(artifact) == Coding("before")


def test_components_are_before_rope_where_the_artifact_has_such(model, artifact):
    """The artifact of a model whose RoPE cannot be undone has none. Losses were measured with the default's components."""
    assert Klt().plan(0, None, artifact).before_rope and not Klt(rope="after").plan(0, None, artifact).before_rope

    def without(part):
        tensors = {name: tensor for name, tensor in artifact.tensors.items() if part not in name}
        return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)

    with pytest.raises(
        ValueError, match="size=True: the artifact has no statistics of keys before RoPE, which this needs"
    ):
        Klt(size=True).plan(0, None, without("klt.before"))
    for part, options in (("klt.sized", {}), ("predicted", {"predict": True})):
        with pytest.raises(
            ValueError, match=rf"needs tensor '\w+\.(klt\.)?{part}\.errors', which is not in this artifact"
        ):
            Klt(size=True, **options).plan(0, None, without(part))
    rest = without("klt.before")
    assert not Klt().plan(0, None, rest).before_rope
    assert Klt(loss=0.3).allocations(rest) == Klt(loss=0.3, rope="after").allocations(artifact)
    with pytest.raises(ValueError, match=r"needs tensor 'keys\.klt\.before\.errors', which is not in this artifact"):
        Klt(rope="before").plan(0, None, rest)
    assert Klt(loss=0.3).allocations(without("klt.loss")) == Klt(loss=0.3).allocations(artifact)
    with pytest.raises(ValueError, match="rope='after': the fit measured losses of keys before RoPE; leave rope out"):
        Klt(loss=0.3, rope="after").allocations(without("klt.loss"))


def test_sizes_of_two_heads_take_a_byte_in_a_cache_and_a_word_in_a_chunk(artifact):
    for whole_words, wanted in ((False, [1, 1, 2, 2, 4]), (True, [2, 2, 2, 2, 4])):
        method = Klt(bits=2, size=True)
        coding = method.coding(artifact, whole_words)
        assert [coding.size_bytes(heads) for heads in (1, 2, 3, 4, 5)] == wanted
        (allocation,) = method.allocations(artifact, coding)
        for _, stages in method.tier(0, allocation, artifact, coding).streams():
            field = stages.codec.fields(32, torch.bfloat16)["sizes"]
            assert field.row_bytes(2) == wanted[1] and field.shared
