"""ZipCache, MiKV, H2O, StreamingLLM and oracle eviction against the equations in float64, forward by forward."""

from functools import partial

import layer_walk
import numpy as np
import pytest
from importance.layer import LayerOracle
from importance.oracles import ORACLES
from importance.scenarios import (
    EVICTED,
    OUTPUT,
    SCENARIOS,
    THREE,
    WALKS,
    Scenario,
    computing,
    others,
    tiers_of,
    walk_beside,
    zipcache,
)
from in_turn import a_part
from layer_walk import Tokens, feed

from calib.runtime import compress
from calib.runtime.logits import Logits

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize("scenario", a_part(SCENARIOS))
def test_a_method_does_what_its_equations_say(scenario):
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS[scenario.walk]), seed=scenario.tokens))


@pytest.mark.parametrize("method", ORACLES)
def test_logits_with_a_soft_cap(method, monkeypatch):
    """As Gemma 2 computes them; a prompt then has no fast attention, and is exact all the same."""
    cap = 5.0
    monkeypatch.setattr(LayerOracle, "softcap", cap)
    monkeypatch.setattr(layer_walk, "Logits", partial(Logits, softcap=cap))
    options = {"zipcache": {"recompress": 32}, "streaming_llm": {"window": 30}}.get(method, {})
    scenario = Scenario(method, options, "turns", tokens=7)
    walk_beside(scenario, scenario.model(), Tokens.random(scenario.model(), sum(WALKS["turns"]), seed=scenario.tokens))


@pytest.mark.full
@pytest.mark.parametrize("scenario", [zipcache(tiers=THREE), others("mikv", important=4)], ids=str)
def test_channels_that_never_move(scenario):
    """A constant channel has no range: s = 0, and every code decodes to its value (ZipCache); maxima of 0 give c = b = 1."""
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
    others("mikv", policy="normalised", recent=0),
    others("mikv", policy="local", important=4),
    others("h2o", policy="fastgen", recovery=0.5, heavy=0.4),
    others("streaming_llm", window=30),
    others("oracle"),
    # Under a sliding window, which counts a row's tokens without padding.
    zipcache(tiers=EVICTED, logits={"sliding": 48}),
    others("mikv", important=4, logits={"sliding": 48}),
    others("h2o", logits={"sliding": 48}),
    others("streaming_llm", window=40, logits={"sliding": 48}),
]
# Tokens of each row in each forward: prompts with blocks and without, rows that begin later (with padding, or beside
# rows that add as many tokens to those they hold), chunks of any size.
ROUNDS = [
    [130, 20, 77, 0, 0],
    [1, 1, 1, 40, 0],
    [36] * 5,
    [3, 0, 40, 1, 2],
    *[[1] * 5] * 25,
    [2, 33, 0, 70, 20],
    *[[1] * 5] * 5,
]


def stored(cache, row: int) -> list[list[bytes]]:
    """Every decoded token of a row as bytes, sorted, for each layer, tier and head."""
    return [
        sorted(token.tobytes() for token in np.concatenate([keys[head], values[head]], -1))
        for layer in cache.compressed
        for keys, values in tiers_of(layer.store, row)
        for head in range(len(keys))
    ]


@pytest.mark.full
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
        brought = [row[start : start + size] for row, start, size in zip(rows, at, sizes, strict=True)]
        with computing(scenario):  # with a column of padding for every row
            outputs = feed(together, brought, columns=max(sizes) + (len(set(sizes)) > 1))
        for row, new in enumerate(brought):
            if not len(new):
                continue
            with computing(scenario):
                own = feed(alone[row], [new])
            for number, (expected,) in enumerate(own):
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
