"""OSCAR against its paper in float64: its rotations, computed from queries and attention, and the codes of a cache."""

import math
import re

import numpy as np
import oracle
import pytest
import torch
from cases import calibrated_artifact
from layer_walk import Tokens, feed
from tolerances import FLOAT32_FOLD, ODD_CODES
from toy_artifact import toy_artifact
from toy_layer_sample import SHAPE, rows_of, sample
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.artifact.artifact import ArtifactError
from calib.runtime.methods import Geometry, build
from calib.runtime.stages.codec import Clipped, UniformQuant
from calib.runtime.stages.hadamard import hadamard
from calib.statistics.attention_rotation import AttentionRotations, bit_reversal, rotation

HEADS, GROUP, CHANNELS = 2, 2, 32


def measured(*samples) -> dict[str, np.ndarray]:
    statistic = AttentionRotations(SHAPE)
    for one in samples:
        statistic.observe(one)
    return {name: tensor.double().numpy() for name, tensor in statistic.tensors().items()}


def probabilities(one, row: int, head: int) -> np.ndarray:
    """Attention probabilities S of a query head over a row's tokens without padding, computed token by token."""
    real = one.mask[row].nonzero()[:, 0].tolist()
    queries = one.queries[row, head, real].double().numpy()
    keys = one.keys[row, head // GROUP, real].double().numpy()
    weights = np.zeros((len(real), len(real)))
    for i, query in enumerate(queries):
        first = 0 if one.window is None else max(0, i - one.window + 1)
        logits = keys[first : i + 1] @ query * one.scaling
        if one.softcap is not None:
            logits = one.softcap * np.tanh(logits / one.softcap)
        exponents = np.exp(logits - logits.max())
        weights[i, first : i + 1] = exponents / exponents.sum()
    return weights


def covariances(one, head: int) -> tuple[np.ndarray, np.ndarray]:
    """sum q q^T and V^T S^T S V of a KV head, over the sequences and its query heads."""
    of_queries, of_values = np.zeros((2, CHANNELS, CHANNELS))
    for row in range(len(one.mask)):
        values = one.values[row, head, one.mask[row]].double().numpy()
        for asking in range(GROUP * head, GROUP * (head + 1)):
            queries = one.queries[row, asking, one.mask[row]].double().numpy()
            scores = probabilities(one, row, asking)
            of_queries += queries.T @ queries
            of_values += values.T @ scores.T @ scores @ values
    return of_queries, of_values


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    "options", [{}, {"padding": (0, 9)}, {"window": 7}, {"softcap": 2.0, "padding": (3, 0)}], ids=str
)
def test_a_rotation_is_eigenvectors_hadamard_and_bit_reversal(options):
    """y = (U H P)^T x: undoing P and H leaves eigenvectors of the covariance in float64, the largest eigenvalue first."""
    one = sample(tokens=48, **options)
    found = measured(one)
    reverse = [int(f"{number:05b}"[::-1], 2) for number in range(CHANNELS)]
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(CHANNELS)] for i in range(CHANNELS)])
    for head in range(HEADS):
        for name, covariance in zip(("keys", "values"), covariances(one, head), strict=True):
            turned = found[f"{name}.rotation"][0, head]
            vectors = (signs / math.sqrt(CHANNELS)) @ turned[reverse]  # rows are U's columns
            eigenvalues = np.linalg.eigvalsh(covariance)[::-1]
            np.testing.assert_allclose(
                vectors @ covariance @ vectors.T, np.diag(eigenvalues), atol=2e-6 * eigenvalues[0]
            )


@pytest.mark.arithmetic
def test_all_coordinates_count_the_same():
    """Lemma 1: in the rotated coordinates the diagonal of the covariance is tr(C) / D."""
    one = sample(tokens=48)
    found = measured(one)
    for name, covariance in zip(("keys", "values"), covariances(one, 1), strict=True):
        turned = found[f"{name}.rotation"][0, 1]
        np.testing.assert_allclose(np.diag(turned @ covariance @ turned.T), np.trace(covariance) / CHANNELS, rtol=1e-5)


@pytest.mark.arithmetic
def test_the_most_important_directions_are_in_different_groups():
    """With G groups, a power of two, the G most important directions are in G different groups."""
    for size in (16, 64, 128):
        order = bit_reversal(size)
        for groups in (2, 4, 8):
            assert sorted((order[:groups] // (size // groups)).tolist()) == list(range(groups))


@pytest.mark.arithmetic
@pytest.mark.parametrize("channels", [1, 2, 7, 64, 80, 96, 128])
def test_hadamard_and_bit_reversal_at_any_size(channels):
    block = math.gcd(channels, 2**20)
    matrix, order = hadamard(channels), bit_reversal(channels)
    assert float((matrix @ matrix.mT - torch.eye(channels)).abs().max()) < 1e-12 and torch.equal(matrix, matrix.mT)
    size = 1 / math.sqrt(block)
    inside = torch.arange(channels)[:, None] // block == torch.arange(channels) // block
    assert bool((torch.where(inside, matrix.abs() - size, matrix).abs() < 1e-12).all())
    assert torch.equal(order[order], torch.arange(channels))
    assert torch.equal(order // block, torch.arange(channels) // block)
    random = torch.randn(3, channels, 2 * channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = rotation(random @ random.mT).double()
    assert float((rows @ rows.mT - torch.eye(channels)).abs().max()) < 1e-5


@pytest.mark.arithmetic
def test_parts_of_a_corpus_merge_and_unseen_layers_have_a_rotation():
    one = sample(batch=4, tokens=24, padding=(0, 5))
    whole, first, second = (AttentionRotations(SHAPE) for _ in range(3))
    whole.observe(one)
    first.observe(rows_of(one, slice(0, 2)))
    second.observe(rows_of(one, slice(2, None)))
    first.merge(second)
    for name in whole.reductions:
        torch.testing.assert_close(getattr(first, name), getattr(whole, name), rtol=1e-6, atol=1e-6)
    for tensor in whole.tensors().values():
        assert torch.equal(tensor[1, 0], rotation(torch.zeros(CHANNELS, CHANNELS, dtype=torch.float64)))


@pytest.mark.arithmetic
def test_padding_never_counts():
    one = sample(batch=2, tokens=40, padding=(0, 11))
    for x in (one.queries, one.keys, one.values):
        x[1, :, :11] = 1e4
    padded = measured(one)
    alone = measured(rows_of(one, slice(0, 1)), rows_of(one, slice(1, 2), slice(11, None)))
    for name, tensor in alone.items():
        np.testing.assert_allclose(padded[name], tensor, atol=2e-4)


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("keep", "channels", "rank"),
    [(0.96, 128, 122), (0.92, 128, 117), (0.5, 128, 64), (1.0, 128, 127), (0.29, 100, 29), (0.58, 200, 116)],
)
def test_a_token_is_cut_to_a_magnitude_of_its_own(keep, channels, rank):
    """The limit is the magnitude of rank floor(.96 * 128) = 122 of 0 ... 127: five are larger. 0.29 * 100 is 28.99... in floats."""
    x = torch.randn(2, 3, 7, channels, generator=torch.Generator().manual_seed(1)) ** 3
    found = Clipped(UniformQuant(2), keep).cut(x)
    for token, cut in zip(x.flatten(0, 2).double().numpy(), found.flatten(0, 2).double().numpy(), strict=True):
        tau = np.sort(abs(token))[rank]
        np.testing.assert_array_equal(cut, np.clip(token, -tau, tau))
        assert (abs(token) > tau).sum() == channels - 1 - rank


def coded(x: np.ndarray, turned: np.ndarray, bits: int, group: int, keep: float) -> tuple[np.ndarray, np.ndarray]:
    """x^ of tokens `[T, D]` by the paper's steps in float64, with scales and zero points in float16; and how far each
    coordinate is from the border of its code, in steps."""
    y = x @ turned.T
    tau = np.sort(abs(y), -1)[:, min(int(keep * y.shape[1]), y.shape[1] - 1), None]
    y = np.clip(y, -tau, tau).reshape(len(y), -1, group)
    low, high = y.min(-1, keepdims=True), y.max(-1, keepdims=True)
    scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    zero = low.astype(np.float16).astype(np.float64)
    level = (y - zero) / scale + 0.5
    codes = np.clip(np.floor(level), 0, 2**bits - 1)
    return (codes * scale + zero).reshape(x.shape) @ turned, abs(level - np.round(level)).reshape(x.shape)


@pytest.mark.parametrize(
    "options",
    [{}, {"bits": 4, "group": 32}, {"bits": 3, "group": 16, "key_clip": 1.0, "value_clip": 0.5}],
    ids=str,
)
def test_what_is_stored_is_the_papers(options):
    """A prompt and single tokens after it: sinks and the newest tokens are exact, all between them are by the paper's equations."""
    model = random_model("llama")
    artifact = calibrated_artifact(model)
    tokens = Tokens.random(model, 150, seed=4)
    with compress(model, "oscar", artifact=artifact, sinks=5, window=24, **options) as cache:
        feed(cache, [tokens[:140]])
        for number in range(140, 150):
            feed(cache, [tokens[number : number + 1]])
        held = [oracle.held_tokens(layer, 0) for layer in cache.compressed]
    asked = {"bits": 2, "group": 128, "key_clip": 0.96, "value_clip": 0.92} | options
    odd = []
    for number, found in enumerate(held):
        assert sorted(found.positions[0].tolist()) == list(range(150))
        for stream, given, clip in (("keys", tokens.keys, "key_clip"), ("values", tokens.values, "value_clip")):
            x, own = given[number].double().numpy(), getattr(found, stream).numpy()
            turned = artifact.tensor(f"{stream}.rotation")[number].double().numpy()
            for head in range(len(x)):
                at = found.positions[head].numpy()
                exact = (at < 5) | (at >= 150 - 24)
                np.testing.assert_array_equal(own[head][exact], x[head][at[exact]])
                group = min(asked["group"], x.shape[-1])
                expected, border = coded(x[head][at[~exact]], turned[head], asked["bits"], group, asked[clip])
                off = abs(own[head][~exact] - expected).max(-1) > FLOAT32_FOLD * abs(x[head]).max()
                # A coordinate that float32 puts on the other side of a border, or whose scale float16 rounds otherwise.
                assert border[off].min(initial=0) < 1e-3
                odd.append(off)
    assert np.concatenate(odd).mean() <= ODD_CODES * tokens.keys.shape[-1] * 2


def test_outliers_are_each_tokens_own():
    """Each token, of the prompt or later, has the largest and the least coordinate of a head exact, with sinks or without."""
    model = random_model("llama")
    artifact = calibrated_artifact(model)
    tokens = Tokens.random(model, 80, seed=5)
    for sinks in (0, 5):
        options = {"sinks": sinks, "window": 24, "corrections": {"outliers": 0.1}}  # one of 32 at each end
        with compress(model, "oscar", artifact=artifact, **options) as cache:
            for piece in (tokens[:60], *(tokens[number : number + 1] for number in range(60, 80))):
                feed(cache, [piece])
            # 2 bits, 32 of a range, and two outliers of 24.
            assert cache.memory().marginal_bits == 2 + 32 / 32 + 2 * 24 / 32
            held = [oracle.held_tokens(layer, 0) for layer in cache.compressed]
        for number, found in enumerate(held):
            for stream, given in (("keys", tokens.keys), ("values", tokens.values)):
                turned = artifact.tensor(f"{stream}.rotation")[number].mT
                own, x = getattr(found, stream).float() @ turned, given[number] @ turned
                x = x.gather(1, found.positions[..., None].expand_as(x).long())
                for end in (x.argmax(-1, keepdim=True), x.argmin(-1, keepdim=True)):
                    assert float((own - x).gather(-1, end).abs().max()) < 2e-3 * float(x.abs().max())
    # Calibrated statistics, which other methods are told to use, have no bases for rotated tokens.
    refusal = "rank of keys must be 0, got 4: this method encodes tokens one by one and in another basis"
    for method in ("oscar", "turboquant"):
        with pytest.raises(ValueError, match=f"^{refusal}; use rank=0, or a method that encodes segments"):
            compress(model, method, artifact=artifact, corrections={"rank": 4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_that_only_their_rotation_takes_beyond_16_bits(dtype: torch.dtype):
    """Each is one row of its head's rotation, which becomes a single coordinate."""
    model = random_model("llama", dtype, num_hidden_layers=1)
    artifact = calibrated_artifact(model)
    tokens = Tokens.random(model, 12, seed=0)
    rows = {role: -1e5 * artifact.tensor(f"{role}.rotation")[:, :, :12] for role in ("keys", "values")}
    tokens.keys, tokens.values = (part.clamp(-65504, 65504).to(dtype) for part in rows.values())
    options = {"bits": 8, "sinks": 0, "window": 0, "key_clip": 1.0, "value_clip": 1.0}
    with compress(model, "oscar", artifact=artifact, **options) as cache:
        feed(cache, [tokens])
        found = oracle.held_tokens(cache.compressed[0], 0)
    for held, given in zip(found[:2], (tokens.keys, tokens.values), strict=True):
        assert float((held - given[0].double()).abs().max()) < 1e5 / 255


def test_a_token_has_the_same_codes_alone_and_in_a_batch():
    model = random_model("llama")
    plan = build("oscar", {"window": 0, "sinks": 0}).plan(1, Geometry.of(model.config), calibrated_artifact(model))
    stages = plan.tiers[0].keys
    x = torch.randn(3, 2, 37, CHANNELS, generator=torch.Generator().manual_seed(4))
    together = stages.codec.encode(stages.transform.forward(x))
    for token in (0, 17, 36):
        alone = stages.codec.encode(stages.transform.forward(x[1:2, :, token : token + 1]))
        assert all(torch.equal(alone[name][0, :, 0], together[name][1, :, token]) for name in alone)


def test_an_artifact_without_rotations_says_which_option_measures_them():
    model = random_model("llama")
    with pytest.raises(ValueError, match=r"calib fit --model\.rotations true"):
        compress(model, "oscar")
    artifact = calibrated_artifact(model)
    tensors = {name: x for name, x in artifact.tensors.items() if not name.endswith(".rotation")}
    bare = toy_artifact(model, tensors=tensors, clip_bits=artifact.clip_bits)
    with pytest.raises(
        ArtifactError,
        match=r"'oscar' needs tensor 'keys\.rotation'.*'rotations' of `calib fit --model\.rotations true`",
    ):
        compress(model, "oscar", artifact=bare)


def test_a_rotation_that_is_none_is_refused():
    tensors = dict(toy_artifact().tensors)
    tensors["values.rotation"] = tensors["values.rotation"] * 0.99
    with pytest.raises(ArtifactError, match=r"'values\.rotation' is off by .* expected rows that are orthonormal"):
        toy_artifact(tensors=tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits must be a whole number 1 ... 8, got 0"),
        ({"group": 0}, "group must be a whole number of channels, at least 1, got 0; 128 is usual"),
        ({"sinks": -1}, "sinks must be a whole number of tokens, at least 0, got -1; 64 is usual"),
        ({"window": 1.5}, "window must be a whole number of tokens, at least 0, got 1.5; 256 is usual"),
        ({"key_clip": 0}, "key_clip must be a number in (0, 1], got 0"),
        ({"value_clip": 1.1}, "value_clip must be a number in (0, 1], got 1.1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build("oscar", options)
