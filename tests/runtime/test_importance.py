"""ZipCache, MiKV, H2O, StreamingLLM and oracle eviction against the equations in float64, forward by forward."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from importance_oracle import ORACLES, WINDOW, LayerOracle
from layer_walk import Tokens, feed
from tolerances import FLOAT32_ATTENTION, STORED
from toy_artifact import toy_artifact
from toy_models import random_model

from calib.kernels.probe_saliency.reference import attention_mass
from calib.runtime import compress
from calib.runtime.methods import Geometry

# Queries that were balanced or rotated have gone through one more product than plain ones.
OUTPUT = 2 * FLOAT32_ATTENTION

# Scores of a selection that are closer than this, relative to the larger, might be ordered otherwise by float32:
# probabilities are exponentials of logits of some 10, which are exact to 1e-5. Tokens that come closer say nothing about
# the method; a test then takes others.
CLEAR = 1e-4

HEADS = {1: (2, 2), 2: (4, 2), 4: (4, 1)}  # by query heads of a KV head: heads, KV heads

WALKS = {
    "steps": [130] + [1] * 60,
    "short prompt": [20] + [1] * 60,
    "turns": [80] + [1] * 5 + [90] + [1] * 10,
    "from one": [1] * 45,
}


@dataclass(frozen=True)
class Scenario:
    """A method with options, and the forwards it goes through; `tokens` seeds the keys, values and queries."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    walk: str = "steps"
    gqa: int = 2
    tokens: int = 1
    layers: int = 1
    calibrated: bool = False

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items() if name != "recompress")
        parts = [self.method, options, self.walk, f"gqa {self.gqa}", "calibrated" * self.calibrated]
        return ", ".join(filter(None, parts))

    def model(self) -> Any:
        heads, kv_heads = HEADS[self.gqa]
        return random_model(
            "llama", num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=self.layers
        )


def zipcache(walk: str = "steps", gqa: int = 2, tokens: int = 1, calibrated: bool = False, **options: Any) -> Scenario:
    """Blocks of 32, in two layers: the draws differ between layers."""
    return Scenario("zipcache", {"recompress": 32, **options}, walk, gqa, tokens, 2, calibrated)


def others(method: str, walk: str = "steps", gqa: int = 2, tokens: int = 1, calibrated: bool = False, **options: Any):
    return Scenario(method, options, walk, gqa, tokens, 1, calibrated)


THREE, EVICTED = [[16, 0.1], [4, 0.5], [2, 0.4]], [[4, 0.5], [0, 0.5]]
SCENARIOS = [
    zipcache(),
    zipcache(probes="random", seed=2),  # draws the last token of the prompt
    zipcache(probes="recent"),
    zipcache(probes="all"),
    zipcache(probes="all", saliency="accumulated", probe_share=0.3),
    zipcache(saliency="accumulated", ratio=0.8, seed=3),
    zipcache(tiers=THREE, gqa=1, tokens=2),
    zipcache(tiers=EVICTED),
    zipcache(tiers=[[8, 0.25], [3, 0.25], [0, 0.5]], clip=0.8, gqa=4, tokens=2),
    zipcache(tiers=THREE, value_scale="tier", probe_share=0.4),
    zipcache("short prompt", tiers=THREE, probes="random", tokens=2),
    zipcache("short prompt", probes="recent", gqa=4),
    zipcache("short prompt", tiers=EVICTED, value_scale="tier", tokens=2),
    zipcache("turns", tiers=THREE),
    zipcache("turns", probes="random", probe_share=0.5, gqa=1),
    zipcache("turns", probes="all", tiers=EVICTED, gqa=4),
    zipcache("from one", probes="random", tiers=THREE),
    zipcache("turns", calibrated=True, statistics="calibrated"),
    others("mikv"),
    others("mikv", important=8, retained=4, gqa=1),
    others("mikv", important=4, retained=3, ratio=0.5),
    others("mikv", important=2, ratio=0.25, group=32),
    others("mikv", important=4, balancer=False),
    others("mikv", important=8, balancer=False, ratio=0.5, gqa=4),
    others("mikv", "short prompt", important=8, budget=50),
    others("mikv", "short prompt", budget=30, recent=3, retained=4),
    others("mikv", "turns", important=4),
    others("mikv", "turns", gqa=4, retained=3, clip=0.9),
    others("mikv", "from one", important=8, budget=12),
    others("mikv", "from one", important=2),
    others("mikv", "turns", calibrated=True, important=4, statistics="calibrated"),
    others("h2o"),
    others("h2o", heavy=0.5, recent=0.1, gqa=1),
    others("h2o", heavy=10, recent=20, gqa=4),
    others("h2o", "short prompt", heavy=25, recent=0.5),
    others("h2o", "turns"),
    others("h2o", "from one", heavy=3),
    others("streaming_llm", window=40),
    others("streaming_llm", window=40, positions="original", gqa=1),
    others("streaming_llm", "short prompt", sinks=2, window=30, gqa=4),
    others("streaming_llm", "turns", window=30),
    others("streaming_llm", "from one", window=9),
    others("oracle"),
    others("oracle", "turns", ratio=0.5, gqa=1),
    others("oracle", "from one", gqa=4),
]


def artifact_of(model):
    """Ranges that keys cross now and then, scales and balancers, unequal everywhere."""
    geometry = Geometry.of(model.config)
    shape, draw = (geometry.layers, geometry.kv_heads, geometry.head_dim), torch.Generator().manual_seed(3)
    names = ("keys.low", "keys.high", "values.scale", "keys.balancer")
    tensors = {name: 0.5 + torch.rand(shape, generator=draw) for name in names}
    tensors["keys.low"], tensors["keys.high"] = -2 * tensors["keys.low"], 3 * tensors["keys.high"]
    return toy_artifact(model, tensors=tensors, clip_bits=())


def oracle_of(scenario: Scenario, model, artifact, layer: int) -> LayerOracle:
    """The method in float64 for one row of one layer."""
    options = {name: value for name, value in scenario.options.items() if name != "statistics"}
    if scenario.method == "zipcache":
        options |= {"layer": layer}
        if artifact is not None:
            options["ranges"] = tuple(artifact.tensors[f"keys.{end}"][layer].numpy() for end in ("low", "high"))
            options["scale"] = artifact.tensors["values.scale"][layer].numpy()
    if scenario.method == "mikv" and artifact is not None:
        options["balancer"] = artifact.tensors["keys.balancer"][layer].numpy()
    if scenario.method == "streaming_llm":
        options["frequencies"] = model.model.rotary_emb.inv_freq.numpy()
    return ORACLES[scenario.method](**options)


def tiers_of(store, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What a store holds of a row: keys and values of each tier, `[kv_heads, count, D]`."""
    return [(keys.numpy(), values.numpy()) for keys, values in store.decoded(row)]


def check_stored(store, layer: LayerOracle) -> None:
    """The tiers of a store are the oracle's, token by token; the oracle goes on with the cache's own numbers."""
    packed = [tier for tier, bits in enumerate(layer.bits) if bits]
    expected = [len(layer.tokens(tier)[0]) for tier in packed]
    assert list(store.counts(0)) == expected
    found = tiers_of(store, 0)
    assert len(found) == len(packed)
    for tier, (keys, values) in zip(packed, found, strict=True):
        for head in range(len(layer.tier)):
            assert layer.settle(tier, head, keys[head], values[head]) <= STORED, (tier, head)


def walk_beside(scenario: Scenario, model, tokens: Tokens) -> None:
    """A cache and the oracle go through the same forwards: outputs and tiers must agree after each of them."""
    artifact, at = artifact_of(model) if scenario.calibrated else None, 0
    cache = compress(model, scenario.method, artifact, **scenario.options)
    cache.release()
    layers = [oracle_of(scenario, model, artifact, number) for number in range(scenario.layers)]
    for size in WALKS[scenario.walk]:
        new = tokens[at : at + size]
        outputs = feed(cache, [new])
        for number, layer in enumerate(layers):
            expected = layer.forward(new.queries[number], new.keys[number], new.values[number])
            assert layer.margin > CLEAR, f"selections {layer.margin} apart, take other tokens"
            error = abs(outputs[number][0].double().numpy() - expected).max() / abs(expected).max()
            assert error <= OUTPUT, (at, number)
            if scenario.method != "oracle":
                check_stored(cache.compressed[number].store, layer)
        at += size


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_method_does_what_its_equations_say(scenario):
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS[scenario.walk]), seed=scenario.tokens))


@pytest.mark.parametrize("scenario", [zipcache(tiers=THREE), others("mikv", important=4)], ids=str)
def test_channels_that_never_move(scenario):
    """A constant channel has no range: s = 0, and every code is its value (ZipCache); maxima of 0 give c = b = 1."""
    model = scenario.model()
    tokens = Tokens.random(model, sum(WALKS[scenario.walk]), seed=3)
    tokens.keys[..., 3], tokens.keys[..., 4], tokens.values[..., 5] = 0, 1.5, 0
    tokens.queries[..., 6] = 0
    walk_beside(scenario, model, tokens)


# --- rows, seeds ----------------------------------------------------------------------------------------------------

BATCH = [
    zipcache(probes="random"),
    zipcache(tiers=THREE),
    zipcache(tiers=EVICTED),
    others("mikv", important=4),
    others("mikv", budget=50),
    others("h2o"),
    others("streaming_llm", window=30),
    others("oracle"),
]
# What each row brings to a forward: prompts with blocks and without, a row that begins later, chunks of any size.
ROUNDS = [[130, 20, 77, 0], [1, 1, 1, 40], [3, 0, 40, 1], *[[1, 1, 1, 1]] * 25, [2, 33, 0, 70], *[[1, 1, 1, 1]] * 5]


def stored(cache, row: int) -> list[list[bytes]]:
    """Every decoded token of a row, bit by bit, tier by tier and head by head, in an order of its own."""
    return [
        sorted(token.tobytes() for token in np.concatenate([keys[head], values[head]], -1))
        for layer in cache.compressed
        for keys, values in tiers_of(layer.store, row)
        for head in range(len(keys))
    ]


@pytest.mark.parametrize("scenario", BATCH, ids=str)
def test_a_row_of_a_ragged_batch_is_what_it_is_alone(scenario):
    model = scenario.model()
    totals = [sum(column) for column in zip(*ROUNDS, strict=True)]
    rows = [Tokens.random(model, total, seed=seed) for seed, total in enumerate(totals, 10)]
    together = compress(model, scenario.method, **scenario.options)
    together.release()
    alone = [compress(model, scenario.method, **scenario.options) for _ in rows]
    for cache in alone:
        cache.release()
    at = [0] * len(rows)
    for sizes in ROUNDS:
        fed = [row[start : start + size] for row, start, size in zip(rows, at, sizes, strict=True)]
        outputs = feed(together, fed, columns=max(sizes) + (max(sizes) > 1))  # a column of padding for every row
        for row, new in enumerate(fed):
            if not len(new):
                continue
            for number, (expected,) in enumerate(feed(alone[row], [new])):
                error = (outputs[number][row] - expected).abs().max() / expected.abs().max()
                assert error <= OUTPUT, (sizes, row, number)
        at = [start + size for start, size in zip(at, sizes, strict=True)]
    if scenario.method != "oracle":
        for row, cache in enumerate(alone):
            assert stored(together, row) == stored(cache, 0), row


def test_a_seed_decides_everything():
    scenario = zipcache(probes="random")
    model = scenario.model()
    tokens, contents = Tokens.random(model, 190, seed=1), []
    for seed in (5, 5, 6, 5 + 2**32):
        cache = compress(model, "zipcache", seed=seed, **scenario.options)
        cache.release()
        feed(cache, [tokens[:130]])
        for at in range(130, 190):
            feed(cache, [tokens[at : at + 1]])
        contents.append(stored(cache, 0))
    assert contents[0] == contents[1]
    assert contents[0] != contents[2] and contents[0] != contents[3]


# --- the equations themselves ---------------------------------------------------------------------------------------


def lattice(x: np.ndarray, decoded: np.ndarray, bits: int, group: int) -> None:
    """`decoded [n, D]` are the levels of groups (1, group) of `x`, and each the nearest to its value."""
    parts, found = (part.reshape(len(x), x.shape[1] // group, group) for part in (x, decoded))
    high, low = parts.max(-1, keepdims=True), parts.min(-1, keepdims=True)
    scale, zero = (np.float16(value).astype(np.float64) for value in ((high - low) / (2**bits - 1), low))
    levels = (found - zero) / scale
    # A parameter on the border of two float16 numbers may be the other one: 15 levels of 2^-11, twice.
    slack = 2.0**-6
    assert abs(levels - levels.round()).max() < slack
    assert levels.min() > -slack and levels.max() < 2**bits - 1 + slack
    assert abs(levels - (parts - zero) / scale).max() < 0.5 + slack


def test_values_are_channel_separable_and_tokenwise():
    """ZipCache, eq. 6: v / c in one group a token, c = sqrt(max |v|) over the chunk."""
    scenario = zipcache(tiers=[[4, 1.0]])
    model = scenario.model()
    cache, tokens = compress(model, "zipcache", **scenario.options), Tokens.random(model, 64, seed=4)
    cache.release()
    tokens.values[:, :, :, 3] *= 100
    tokens.values[:, 1, :, 5] = 0
    feed(cache, [tokens])
    for number, layer in enumerate(cache.compressed):
        ((keys, values),) = tiers_of(layer.store, 0)
        for head in range(2):
            exact, found = tokens.values[number, head].double().numpy(), values[head].astype(np.float64)
            c = np.float16(np.sqrt(abs(exact).max(0))).astype(np.float64)
            c[c == 0] = 1
            order = abs(exact[:, None] / c - found / c).mean(-1).argmin(1)
            assert sorted(order) == list(range(64))
            lattice(exact / c, found[order] / c, 4, 32)
            # Keys: one group a channel over the chunk, the range in float16.
            exact, found = tokens.keys[number, head].double().numpy(), keys[head][order].astype(np.float64)
            middle, half = (exact.max(0) + exact.min(0)) / 2, (exact.max(0) - exact.min(0)) / 2
            levels = (found - middle + half) / (2 * half / 15)
            assert abs(levels - levels.round()).max() < 2.0**-6
            assert abs(found - exact).max(0).max() <= (half / 15 * (1 + 2.0**-5)).max()
            assert (abs(found - exact) <= half / 15 * (1 + 2.0**-5)).all()


def test_keys_are_balanced_against_their_queries():
    """MiKV, eq. 2-4: Q(k b) met by q / b, b = sqrt(max |q| / max |k|)."""
    scenario = others("mikv", important=4, ratio=1.0, gqa=4)
    model = scenario.model()
    cache, tokens = compress(model, "mikv", important=4, ratio=1.0), Tokens.random(model, 64, seed=4)
    cache.release()
    tokens.keys[:, :, :, 7] *= 50
    tokens.queries[:, 2, :, 9] *= 30  # one head of the group is enough
    tokens.keys[:, :, :, 11] = 0
    feed(cache, [tokens])
    (keys, values), (empty, _) = tiers_of(cache.compressed[0].store, 0)
    assert keys.shape == (1, 64, 32) and empty.shape[1] == 0
    queries, exact = tokens.queries[0].double().numpy(), tokens.keys[0, 0].double().numpy()
    largest = abs(exact).max(0)
    b = np.sqrt(abs(queries).max((0, 1)) / np.where(largest, largest, 1))
    b = np.float16(np.where(largest, b, 1)).astype(np.float64)
    found = keys[0].astype(np.float64)
    order = abs(exact[:, None] * b - found * b).mean(-1).argmin(1)
    assert sorted(order) == list(range(64))
    lattice(exact * b, found[order] * b, 4, 16)
    lattice(tokens.values[0, 0].double().numpy(), values[0][order].astype(np.float64), 4, 16)


def mass_by_definition(query, keys, places, scale, softcap, sliding) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 7 restricted to the rows at `places`, one row and one head at a time, and how many rows see each token."""
    rows, heads, _, _ = query.shape
    mass, seen = np.zeros((rows, keys.shape[1], keys.shape[2])), np.zeros(keys.shape[2], dtype=int)
    for column, place in enumerate(places):
        first = 0 if sliding is None else max(0, place - sliding + 1)
        seen[first : place + 1] += 1
        for row in range(rows):
            for head in range(heads):
                mine = head // (heads // keys.shape[1])
                logits = keys[row, mine, first : place + 1] @ query[row, head, column] * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                weights = np.exp(logits - logits.max())
                mass[row, mine, first : place + 1] += weights / weights.sum()
    return mass, seen


@pytest.mark.parametrize("places", ["all", "some", "one", "last", "long"])
@pytest.mark.parametrize(("softcap", "sliding"), [(None, None), (2.0, None), (None, 17), (5.0, 40)])
@pytest.mark.parametrize("group", HEADS)
def test_saliency_of_given_probe_rows(group, softcap, sliding, places):
    """Eq. 7 (the sum), eq. 9 (over probe rows) and with the counts eq. 8 (the mean over the rows that see a token)."""
    draw, (heads, kv_heads), total = torch.Generator().manual_seed(group), HEADS[group], 150
    rows = {"all": range(total), "some": [0, 3, 4, 77, 99, 140, 149], "one": [60], "last": [total - 1]}
    if places == "long":  # several tiles of rows, the last of them not full
        total, rows["long"] = 4000, [*range(0, 4000, 20), *range(3995, 4000)]
    probes = torch.tensor(list(rows[places]))
    query = 2 * torch.randn(2, heads, total, 32, generator=draw)[:, :, probes]
    keys = 2 * torch.randn(2, kv_heads, total, 32, generator=draw)
    found = attention_mass(query, keys, probes, 32**-0.5, softcap=softcap, sliding=sliding)
    assert found.dtype == torch.float32 and found.shape == (2, kv_heads, total)
    parts = (query.double().numpy(), keys.double().numpy(), probes.tolist())
    mass, seen = mass_by_definition(*parts, 32**-0.5, softcap, sliding)
    np.testing.assert_allclose(found.numpy(), mass, rtol=OUTPUT, atol=1e-12)
    assert abs(found.double().sum(-1).numpy() - len(probes) * group).max() <= FLOAT32_ATTENTION * len(probes) * group
    assert (found.numpy()[:, :, seen == 0] == 0).all()
    normalised = found.double().numpy() / np.maximum(seen, 1)
    assert (normalised <= group * (1 + FLOAT32_ATTENTION)).all()


def test_saliency_is_that_of_the_oracle():
    """The oracle's own eq. 7-9, for the rows that it draws, from the kernel."""
    for kind in ("normalised", "accumulated"):
        layer = ORACLES["zipcache"](recompress=32, saliency=kind, probe_share=0.2)
        model = zipcache().model()
        tokens = Tokens.random(model, 130, seed=1)
        layer.forward(tokens.queries[0], tokens.keys[0], tokens.values[0])
        probes = torch.tensor([token for token in range(130) if layer.is_probe(token)])
        assert len(probes) == 26 and not layer.tokens(WINDOW)[0].size
        mass = attention_mass(tokens.queries[:1][:, :, probes], tokens.keys[:1], probes, 32**-0.5)[0].double().numpy()
        seen = (probes[:, None] >= torch.arange(130)).sum(0).clamp(min=1).numpy()
        expected = mass / seen if kind == "normalised" else mass
        assert abs(layer.saliency - expected).max() <= FLOAT32_ATTENTION * expected.max()
