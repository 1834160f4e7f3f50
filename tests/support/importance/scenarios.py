"""Scenarios of the importance methods: options and forwards, in which a cache is compared with its oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import layer_walk
import numpy as np
import pytest
import torch
from importance.budget import HeavyHitterBudget
from importance.layer import LayerOracle
from importance.oracles import ORACLES
from importance.policies import Policy
from layer_walk import Tokens, feed
from tolerances import FLOAT32_ATTENTION, STORED
from toy_artifact import toy_artifact
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.methods import Geometry

# Balanced or rotated queries have one product more than others, so twice the rounding.
OUTPUT = 2 * FLOAT32_ATTENTION

# Scores of a selection that are closer than this, relative to the larger, may be ordered differently by float32: probabilities are
# exponentials of logits of about 10, which are exact to 1e-5. A test with closer scores must use other tokens.
CLEAR = 1e-4

HEADS = {1: (2, 2), 2: (4, 2), 4: (4, 1)}  # query heads of a KV head: (query heads, KV heads)

WALKS = {
    "steps": [130] + [1] * 60,
    "short prompt": [20] + [1] * 60,
    "turns": [80] + [1] * 5 + [90] + [1] * 10,
    "from one": [1] * 45,
    "pages": [300] + [1] * 15 + [150] + [1] * 5,
}


IDS = 20  # number of different token ids, for policies with special tokens


@dataclass(frozen=True)
class Scenario:
    """A method with options and the forwards of a row (`walk`); `tokens` is the seed of its keys, values and queries.

    `logits` are the `scale`, `softcap` and `sliding` window by which the model, of `dtype`, computes logits, where they are not
    the usual ones.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    walk: str = "steps"
    gqa: int = 2
    tokens: int = 1
    layers: int = 1
    calibrated: bool = False
    logits: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items() if name != "recompress")
        logits = " ".join(f"{name} {value}" for name, value in self.logits.items())
        dtype = "" if self.dtype == torch.float32 else str(self.dtype).removeprefix("torch.")
        parts = [self.method, options, self.walk, f"gqa {self.gqa}", "calibrated" * self.calibrated, logits, dtype]
        return ", ".join(filter(None, parts))

    def model(self) -> Any:
        heads, kv_heads = HEADS[self.gqa]
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": self.layers}
        if "sliding" in self.logits:
            return random_model("mistral-sliding", self.dtype, sliding_window=self.logits["sliding"], **shape)
        return random_model("llama", self.dtype, **shape)


def zipcache(walk: str = "steps", gqa: int = 2, tokens: int = 1, calibrated: bool = False, **options: Any) -> Scenario:
    """A scenario of ZipCache with blocks of 32 tokens and two layers, whose draws of probes differ."""
    own = {name: options.pop(name) for name in ("logits", "dtype") if name in options}
    return Scenario("zipcache", {"recompress": 32, **options}, walk, gqa, tokens, 2, calibrated, **own)


def others(method: str, walk: str = "steps", gqa: int = 2, tokens: int = 1, calibrated: bool = False, **options: Any):
    own = {name: options.pop(name) for name in ("layers", "logits", "dtype") if name in options}
    return Scenario(method, options, walk, gqa, tokens, calibrated=calibrated, **own)


THREE, EVICTED = [[16, 0.1], [4, 0.5], [2, 0.4]], [[4, 0.5], [0, 0.5]]
SCENARIOS = [
    zipcache(),
    zipcache(probes="random", seed=2),  # a seed with which the last token of the prompt is a probe
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
    zipcache("pages"),
    zipcache(refresh=False),
    zipcache(tiers=[[{"keys": 8, "values": 3}, 0.5], [{"keys": 2, "values": 3}, 0.5]]),
    zipcache("turns", tiers=[[{"keys": 4, "values": 16}, 0.5], [2, 0.3], [0, 0.2]], tokens=2),
    zipcache("turns", refresh=False, tiers=THREE),
    zipcache("short prompt", refresh=False, value_scale="tier", tokens=2),
    zipcache(salient_set="layer", probes="all"),
    zipcache(salient_set="layer", scope="layer", gqa=1, tokens=2),
    zipcache("turns", salient_set="layer", scope="layer", tiers=THREE, tokens=2),
    zipcache("pages", salient_set="layer", scope="layer", refresh=False),
    zipcache(salient_set="layer", scope="layer", value_scale="tier"),  # Algorithms 1 and 2 as they are written
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
    others("mikv", "pages", tokens=2, important=4, ratio=0.5),
    others("mikv", "turns", calibrated=True, important=4, statistics="calibrated"),
    others("mikv", important={"keys": 16, "values": 8}, retained={"keys": 4, "values": 2}),
    others("mikv", "turns", gqa=4, important={"keys": 4, "values": 16}, retained={"keys": 2, "values": 3}),
    others("mikv", "turns", calibrated=True, important={"keys": 8, "values": 4}, statistics="calibrated"),
    others("h2o"),
    others("h2o", heavy=0.5, recent=0.1, gqa=1),
    others("h2o", heavy=10, recent=20, gqa=4),
    others("h2o", "short prompt", heavy=25, recent=0.5),
    others("h2o", "turns"),
    others("h2o", "from one", heavy=3),
    others("h2o", "pages", heavy=0.5, recent=140),
    # Other policies: the newest tokens alone, heavy hitters alone, ZipCache's saliency, one for each head.
    *(others(method, walk, policy="local", tokens=2) for method in ("mikv", "h2o") for walk in ("steps", "turns")),
    others("mikv", important=4, recent=0),
    others("mikv", "turns", important=8, recent=0, balancer=False, gqa=1),
    others("mikv", "from one", important=4, recent=0, budget=10, policy="normalised"),
    others("mikv", "short prompt", recent=0, budget=30, policy="normalised", probes="all"),
    others("mikv", "pages", important=4, recent=0, policy="normalised", tokens=2),
    others("mikv", "from one", policy="local", budget=9),
    others("h2o", recent=0),
    others("h2o", "turns", heavy=0, recent=30, gqa=4),
    others("h2o", "short prompt", heavy=24, recent=0),
    others("h2o", "from one", heavy=7, recent=0, policy="normalised"),
    others("mikv", policy="normalised"),
    others("mikv", "turns", policy="normalised", important=4, gqa=1, seed=5),
    others("mikv", policy="normalised", probes="recent", recent=4, important=8),
    others("mikv", policy="accumulated", probes="random", probe_share=0.3, important=8),
    others("h2o", policy="normalised", probes="special", special_ids=(3, 7)),
    others("h2o", "pages", policy="normalised", probe_share=0.5),
    *(others(method, "turns", policy="normalised", probes="random", layers=2) for method in ("h2o", "mikv")),
    others("h2o", "short prompt", policy="normalised", probes="all", heavy=0.5),
    others("mikv", policy="fastgen", recovery=0.42),
    others("mikv", "turns", policy="fastgen", recovery=0.505, important=4, special_ids=(3, 7), tokens=2),
    others("mikv", policy="fastgen", recovery=0.81, ratio=0.4, special_ids=(3, 7, 11, 12), probes="all", gqa=1),
    others("h2o", policy="fastgen", recovery=0.6, special_ids=(3,), gqa=1),
    others("h2o", "short prompt", policy="fastgen", recovery=0.65, special_ids=(3, 7), probe_share=0.4),
    others("h2o", "from one", policy="fastgen", heavy=4, recent=3, special_ids=(3, 7)),
    others("h2o", policy="fastgen", heavy=0.3, recent=0, recovery=0.685, probes="all"),
    others("mikv", "steps", calibrated=True, important=4, statistics="calibrated", keys="channel"),
    others("mikv", "turns", calibrated=True, statistics="calibrated", keys="channel", clip=0.9, gqa=4),
    others("streaming_llm", window=40),
    others("streaming_llm", window=40, positions="original", gqa=1),
    others("streaming_llm", "short prompt", sinks=2, window=30, gqa=4),
    others("streaming_llm", "turns", window=30),
    others("streaming_llm", "from one", window=9),
    others("streaming_llm", "pages", window=200),
    others("oracle"),
    others("oracle", "turns", ratio=0.5, gqa=1),
    others("oracle", "from one", gqa=4),
    others("oracle", "pages", gqa=1, tokens=2),
    # A sliding window shorter than prompts, and longer than the first one; soft cap and scale with it.
    *(
        zipcache(walk, logits={"sliding": 48}, **more)
        for walk, more in (("turns", {"tiers": THREE}), ("pages", {"tokens": 2}))
    ),
    zipcache(logits={"sliding": 137}, probes="random"),
    zipcache("turns", logits={"sliding": 20, "softcap": 6.0, "scale": 0.3}, saliency="accumulated", gqa=4),
    *(others("mikv", "turns", gqa=gqa, important=4, logits={"sliding": 48}) for gqa in (1, 2)),
    others("mikv", "turns", important=4, ratio=0.5, logits={"sliding": 90}),
    others("mikv", "turns", recent=0, policy="normalised", logits={"sliding": 20, "softcap": 6.0, "scale": 0.3}),
    *(others("h2o", walk, logits={"sliding": 48}) for walk in ("turns", "from one")),
    others("h2o", logits={"sliding": 137}, gqa=4),
    others("h2o", "turns", heavy=0.3, recent=0, logits={"sliding": 20, "softcap": 6.0, "scale": 0.3}),
    others("h2o", "turns", policy="fastgen", recovery=0.6, logits={"sliding": 48}),
    *(others("streaming_llm", "turns", window=window, logits={"sliding": 48}) for window in (40, 60)),
    others("streaming_llm", "turns", window=40, positions="original", logits={"sliding": 30}, gqa=4),
    others("oracle", "turns", ratio=0.5, logits={"sliding": 48}),
    others("oracle", "from one", logits={"sliding": 20, "scale": 0.3}, gqa=4),
]


def artifact_of(model):
    """An artifact with random ranges, which keys sometimes exceed, scales and balancers; all entries differ."""
    geometry = Geometry.of(model.config)
    shape, draw = (geometry.layers, geometry.kv_heads, geometry.head_dim), torch.Generator().manual_seed(3)
    names = ("keys.low", "keys.high", "values.scale", "keys.balancer")
    tensors = {name: 0.5 + torch.rand(shape, generator=draw) for name in names}
    tensors["keys.low"], tensors["keys.high"] = -2 * tensors["keys.low"], 3 * tensors["keys.high"]
    return toy_artifact(model, tensors=tensors, clip_bits=())


# Options of `h2o` and `mikv` that belong to the policy, and their names in the oracle's `Policy`.
POLICY = {"policy": "name", "probe_share": "share"} | {
    name: name for name in ("probes", "special_ids", "recovery", "seed")
}


def oracles_of(scenario: Scenario, model, artifact=None) -> list[LayerOracle]:
    """The scenario's oracles of one row, one for each layer, which compute logits as its model does."""
    layers = [oracle_of(scenario, model, artifact, number) for number in range(scenario.layers)]
    for layer in layers:
        layer.logit_scale = scenario.logits.get("scale")
        layer.softcap, layer.sliding = scenario.logits.get("softcap", layer.softcap), scenario.logits.get("sliding")
    return layers


def oracle_of(scenario: Scenario, model, artifact, layer: int) -> LayerOracle:
    """The scenario's oracle of one row of one layer."""
    options = {name: value for name, value in scenario.options.items() if name != "statistics"}
    if scenario.method in ("mikv", "h2o"):
        own = {POLICY[name]: options.pop(name) for name in list(options) if name in POLICY}
        options["policy"] = Policy(**own, layer=layer)
    if scenario.method == "zipcache":
        options |= {"layer": layer}
        if artifact is not None:
            options["ranges"] = tuple(artifact.tensors[f"keys.{end}"][layer].numpy() for end in ("low", "high"))
            options["scale"] = artifact.tensors["values.scale"][layer].numpy()
    if options.pop("keys", "token") == "channel":
        options["ranges"] = tuple(artifact.tensors[f"keys.{end}"][layer].numpy() for end in ("low", "high"))
    elif scenario.method == "mikv" and artifact is not None:
        options["balancer"] = artifact.tensors["keys.balancer"][layer].numpy()
    if scenario.method == "streaming_llm":
        options["frequencies"] = model.model.rotary_emb.inv_freq.double().numpy()
    return ORACLES[scenario.method](**options)


def tiers_of(store, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The decoded keys and values of each tier of a row, `[kv_heads, count, D]`."""
    return [(keys.numpy(), values.numpy()) for keys, values in store.decoded(row)]


def check_stored(store, layer: LayerOracle, row: int = 0) -> None:
    """Assert that a row's tiers hold the oracle's tokens, to STORED; the oracle continues with the cache's decoded tokens."""
    packed = [tier for tier, bits in enumerate(layer.bits) if bits]
    expected = [len(layer.tokens(tier)[0]) for tier in packed]
    assert list(store.counts(row)) == expected
    found = tiers_of(store, row)
    assert len(found) == len(packed)
    for tier, (keys, values) in zip(packed, found, strict=True):
        for head in range(len(layer.tier)):
            assert layer.settle(tier, head, keys[head], values[head]) <= STORED, (tier, head)


@contextmanager
def computing(scenario: Scenario) -> Iterator[None]:
    """A context in which `feed` computes logits as the scenario's model does."""
    usual = layer_walk.Logits  # a test may have replaced it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_walk, "Logits", lambda scale: replace(usual(scale), **scenario.logits))
        yield


def walk_beside(scenario: Scenario, model, tokens: Tokens) -> None:
    """Run a cache and the oracle through the same forwards; assert after each that outputs and tiers agree."""
    artifact, at = artifact_of(model) if scenario.calibrated else None, 0
    cache = compress(model, scenario.method, artifact, **scenario.options)
    cache.release()
    layers = oracles_of(scenario, model, artifact)
    ids = torch.randint(0, IDS, (1, len(tokens)), generator=torch.Generator().manual_seed(scenario.tokens))
    for size in WALKS[scenario.walk]:
        new = tokens[at : at + size]
        for layer in layers:
            if isinstance(layer, HeavyHitterBudget):
                layer.policy.ids = ids[0, : at + size].numpy()
        if "special_ids" in scenario.options:
            cache.sequences.ids = ids[:, at : at + size]
        with computing(scenario):
            outputs = feed(cache, [new])
        for number, layer in enumerate(layers):
            expected = layer.forward(new.queries[number], new.keys[number], new.values[number])
            assert layer.margin > CLEAR, f"selections {layer.margin} apart, take other tokens"
            error = abs(outputs[number][0].double().numpy() - expected).max() / abs(expected).max()
            assert error <= OUTPUT, (at, number)
            if scenario.method != "oracle":
                check_stored(cache.compressed[number].store, layer)
        at += size
