"""Sinks: a row's first tokens always stay exact, stored before the window; tiers hold tokens after them."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import layer_walk
import oracle
import placement.layer
import placement.walk
import pytest
import torch
from contract.mirror import odd_in_tiers
from importance.chunks import ZipCache
from importance.oracles import ORACLES
from importance.scenarios import WALKS, Scenario, walk_beside
from launches import watch
from layer_walk import Tokens, differing, feed, stored
from offloaded_tokens import moments
from placement.scenarios import specache
from step_tape import Tape
from tolerances import ATTENTION, MEMORY
from toy_models import generate, left_padded, random_model
from transformers import DynamicCache

from calib.evaluate import stored as evaluated
from calib.runtime import compress, methods
from calib.runtime.graphs import step_graphs
from calib.runtime.logits import Logits
from calib.runtime.stages.codec import Exact

SINKS, SLIDING = 5, 60


@dataclass(frozen=True)
class Behind:
    """Another method's plan with sinks, and with `window` or `before_rope` if it does not have these itself."""

    name: ClassVar[str] = "behind"

    low: Any
    sinks: int = SINKS
    window: int | None = None
    before_rope: bool = False

    def plan(self, *asked: Any) -> Any:
        plan = self.low.plan(*asked)
        window = plan.tiering.window if self.window is None else self.window
        tiering = replace(plan.tiering, sinks=self.sinks, window=window)
        return replace(plan, tiering=tiering, before_rope=plan.before_rope or self.before_rope)


CODES = {"low": {"method": "zipcache", "tiers": [[2, 1.0]], "recompress": 8, "refresh": False}, "window": 16}
EXACT = {"low": {"method": "zipcache", "tiers": [[16, 1.0]], "recompress": 8, "refresh": False}, "window": 16}
TIERS = {"low": {"method": "zipcache", "recompress": 20, "refresh": False}}
CSR = {"low": {"method": "csr", "sparsity": 4, "online": 40, "window": 16, "block": 8}}
CSR_TIERS = {"low": {"method": "csr", "online": 40, "tiers": [[16, 0.2], [4, 0.8]], "block": 20}}
BEFORE = {"before_rope": True}
PLANS = {
    "codes": CODES,
    "codes before RoPE": CODES | BEFORE,
    "tiers": TIERS,
    "tiers before RoPE": TIERS | BEFORE,
    "csr": CSR,
    "csr tiers": CSR_TIERS,
}
named = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@pytest.fixture(autouse=True)
def behind(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "behind", Behind)


def opened(model, plan: dict[str, Any], **rest: Any):
    cache = compress(model, "behind", **plan, **rest)
    cache.release()
    return cache


def joined(parts: list[Tokens]) -> Tokens:
    return Tokens(*(torch.cat([getattr(part, name) for part in parts], 2) for name in vars(parts[0])))


def complete(options: dict[str, Any], prompt: int, length: int) -> int:
    """The position of the first exact token that is no sink, in a row of `length` tokens; 0 if no token is encoded."""
    low = options["low"]
    block = low.get("recompress", low.get("block"))
    window = options.get("window", low.get("window", 0))
    first = SINKS + max(prompt - SINKS - window, block)
    newest = length - window
    return 0 if newest < first else newest - (newest - first) % block


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize("sliding", [None, SLIDING])
@pytest.mark.parametrize("plan", [plan for name, plan in PLANS.items() if name != "csr tiers"], ids=[*PLANS][:-1])
def test_attention_is_that_over_sinks_tiers_and_window(plan, sliding, monkeypatch):
    """Against float64: prompts shorter than the sinks, than a first chunk, and longer; steps, chunks, reordered rows. Each token
    held is one that was fed, once; sinks and window have its bits."""
    monkeypatch.setattr(layer_walk, "Logits", partial(Logits, sliding=sliding))
    model = random_model("llama") if sliding is None else random_model("mistral-sliding", sliding_window=sliding)
    cache, given, prompts = opened(model, plan), [], [2, 23, 90]
    sizes = [prompts, [9, 1, 3], *[[1, 1, 1]] * 18, [40, 5, 70], *[[1, 1, 1]] * 5]
    for number, new in enumerate(sizes):
        if number == 12:
            cache.batch_select_indices(torch.tensor([2, 0, 1]))
            given, prompts = ([part[row] for row in (2, 0, 1)] for part in (given, prompts))
        brought = [Tokens.random(model, size, seed=10 * number + row) for row, size in enumerate(new)]
        before = moments(cache)
        outputs = feed(cache, brought, columns=max(new) + 1 if len(set(new)) > 1 else None)
        given = [joined([old, own]) for old, own in zip(given, brought, strict=True)] if given else brought
        assert worst(outputs, before, brought, sliding) < ATTENTION[torch.float32], number
        for layer, compressed in enumerate(cache.compressed):
            store = compressed.store
            for row, tokens in enumerate(given):
                own = [part[layer][None] for part in (tokens.keys, tokens.values)]
                odd = odd_in_tiers(store, row, *own)
                stop = complete(plan, prompts[row], len(tokens))
                assert not odd and sum(store.counts(row)) == max(0, stop - SINKS), (number, layer, row, odd)
                if all(tier.knows_positions for tier in store.tiers):
                    positions = oracle.held_by(store, row).positions.sort(1).values
                    assert torch.equal(positions, torch.arange(len(tokens)).expand_as(positions))
    assert all(
        tier.stores_positions == (len(store.tiers) > 1 and (store.plan.before_rope or bool(sliding)))
        for tier in store.tiers
    )


def worst(outputs, before, brought: list[Tokens], sliding: int | None) -> float:
    """The largest error of a forward against attention in float64 over what was held before it."""
    found = 0.0
    for layer, rows in enumerate(outputs):
        for row, new in enumerate(brought):
            keys, values = new.keys[layer].double(), new.values[layer].double()
            held = before[layer][row].held if before else None
            at = 0 if held is None else held.keys.shape[1]
            positions = torch.arange(at, at + len(new)).expand(keys.shape[:2])
            if held is not None:
                keys, values = torch.cat([held.keys, keys], 1), torch.cat([held.values, values], 1)
                own = torch.arange(at).expand(keys.shape[0], at) if held.positions is None else held.positions
                positions = torch.cat([own, positions], 1)
            query = new.queries[layer]
            expected = oracle.attention(
                query, keys, values, query.shape[-1] ** -0.5, sliding=sliding, positions=positions
            )
            found = max(found, float((rows[row].double() - expected).abs().max() / expected.abs().max()))
    return found


class SalientBehind(ZipCache):
    """The equations of ZipCache, whose first chunk begins after the sinks."""

    def __init__(self, low: dict[str, Any], sinks: int = SINKS) -> None:
        super().__init__(**{name: value for name, value in low.items() if name != "method"})
        self.sinks = sinks

    def first(self) -> int:
        return self.sinks + max(self.prompt - self.sinks, self.block)

    def coded_from(self, start: int) -> int:
        return max(start, self.sinks)


@pytest.mark.arithmetic
@pytest.mark.parametrize("walk", ["steps", "short prompt", "turns", "from one"])
def test_saliency_ranks_all_but_the_sinks(walk, monkeypatch):
    """Queries attend to the sinks most of all; which of the others are salient follows from ZipCache's equations."""
    monkeypatch.setitem(ORACLES, "behind", SalientBehind)
    low = {
        "method": "zipcache",
        "recompress": 12,
        "tiers": [[16, 0.1], [4, 0.5], [2, 0.4]],
        "probes": "all",
        "refresh": False,
    }
    scenario = Scenario("behind", {"low": low}, walk)
    tokens = Tokens.random(scenario.model(), sum(WALKS[walk]), seed=1)
    tokens.keys[:, :, :SINKS] = tokens.queries[:, ::2, :1] * 0.5
    walk_beside(scenario, scenario.model(), tokens)


@pytest.mark.arithmetic
@named
def test_neither_batch_nor_padding_nor_drafts_leave_a_trace(plan):
    model = random_model("llama")
    tokens, poison = Tokens.random(model, 90, seed=1), Tokens.random(model, 40, seed=2, magnitude=1e30)
    sizes = [33, 4, 1, 1, 20, *[1] * 31]
    plain, drafted, batch = opened(model, plan), opened(model, plan), opened(model, plan)
    drafted.activate_past_recording()
    at = 0
    for size in sizes:
        new = tokens[at : at + size]
        feed(plain, [new])
        feed(drafted, [joined([new, poison[:3]]) if at else new])
        drafted.crop(-3 if at else 0)
        feed(batch, [poison[at % 20 : at % 20 + size], new], columns=size + 2)
        at += size
    assert not differing(stored(drafted, 0), stored(plain, 0), mass=0)
    assert not differing(stored(batch, 1), stored(plain, 0))


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    "scenario",
    [
        specache("turns", low={"method": "behind"} | CODES),
        specache("singles", low={"method": "behind"} | CODES | BEFORE, speculative=False, k=1000),
        specache("rows", low={"method": "behind"} | CSR, gqa=4),
        specache("turns", low={"method": "behind"} | TIERS, sliding=30),
        specache("pages", low={"method": "behind"} | CODES, sliding=100, k=64),
    ],
    ids=str,
)
def test_a_sink_is_never_fetched(scenario, monkeypatch):
    """Fetched are the most attended tokens of the tiers, whose packed copies are then hidden; none that the device has exactly."""
    candidates = placement.layer.SpeCacheRow.candidates

    def of_tiers(row, scores, packed, stop):
        found = candidates(row, scores, packed, stop)
        found[:, :SINKS] = -1
        return found

    monkeypatch.setattr(placement.layer.SpeCacheRow, "candidates", of_tiers)
    monkeypatch.setattr(placement.walk, "packed", complete)
    walk = placement.walk.Walk(scenario).run()
    assert not walk.problems, "\n".join(walk.problems)
    assert walk.tally.choices and walk.mattered > 10
    assert walk.tally.ties <= 1 + walk.tally.choices / 200


@pytest.mark.full
@pytest.mark.parametrize("asked", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 5}], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_exact_tiers_answer_as_the_full_cache_does(family, asked):
    model, inputs = random_model(family), left_padded([70, 3] if "prompt_lookup_num_tokens" not in asked else [70])
    expected = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=40, **asked).sequences
    for plan in (EXACT, EXACT | BEFORE):
        with compress(model, "behind", **plan) as cache:
            assert torch.equal(generate(model, inputs, cache, max_new_tokens=40, **asked).sequences, expected)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["codes", "tiers", "csr tiers"])
def test_replayed_steps_are_those_that_run_one_by_one(plan, monkeypatch):
    monkeypatch.setattr(step_graphs, "recorder", lambda device: Tape)
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    model, inputs, answers = random_model("llama"), left_padded([3, 70]), []
    for graphs in (False, True):
        with compress(model, "behind", graphs=graphs, **PLANS[plan]) as cache:
            answers.append(generate(model, inputs, cache, max_new_tokens=60).sequences)
            assert not graphs or cache.graphs.replays > 20
    assert torch.equal(*answers)


@pytest.mark.arithmetic
@pytest.mark.parametrize("sliding", [None, SLIDING])
@pytest.mark.parametrize("plan", ["codes", "csr"])
def test_kernels_meet_the_tier_at_its_positions(plan, sliding, monkeypatch):
    """RoPE's angles in a tier begin at the first position after the sinks, and a sliding window counts positions, not slots."""
    monkeypatch.setattr(layer_walk, "Logits", partial(Logits, sliding=sliding))
    family, changes = ("llama", {}) if sliding is None else ("mistral-sliding", {"sliding_window": sliding})
    model = random_model(family, num_hidden_layers=1, **changes)
    outputs = []
    for way in ("reference", "triton"):
        cache = opened(model, PLANS[plan])
        monkeypatch.setenv("CALIB_KERNELS", "reference")
        feed(cache, [Tokens.random(model, 85, seed=1)])
        monkeypatch.setenv("CALIB_KERNELS", way)
        cache.layers[0].to(torch.device("cpu"))  # pages lie as they are read
        with monkeypatch.context() as patched:
            launches = watch(patched)
            outputs.append(feed(cache, [Tokens.random(model, 1, seed=2)])[0][0])
            assert bool(launches) == (way == "triton")
    assert float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max()) < 2**-12


@pytest.mark.arithmetic
@named
def test_a_saved_prefix_goes_on_and_everything_is_weighed(plan, tmp_path):
    model, path = random_model("llama"), tmp_path / "prefix.safetensors"
    with compress(model, "behind", **plan) as cache:
        feed(cache, [Tokens.random(model, size, seed=size) for size in (3, 130, 61)], columns=131)
        cache.save(path)
        with compress(model, "behind", prefix=path, **plan) as again:
            for seed in range(4):
                new = [Tokens.random(model, 12 if seed else 1, seed=seed + row) for row in range(3)]
                for one, other in zip(feed(cache, new), feed(again, new), strict=True):
                    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
            assert not any(differing(stored(again, row), stored(cache, row), mass=0) for row in range(3))
        memory = cache.memory()
    assert memory.predicted_bytes == pytest.approx(memory.measured_bytes, rel=MEMORY)
    without = {name: value for name, value in plan.items() if name != "sinks"} | {"sinks": 0}
    with compress(model, "behind", **without) as cache:
        feed(cache, [Tokens.random(model, 130, seed=1)])
        assert cache.memory().marginal_bits == memory.marginal_bits


@pytest.mark.arithmetic
@pytest.mark.parametrize("plan", [EXACT, EXACT | BEFORE, TIERS | BEFORE, TIERS])
def test_evaluation_knows_which_tokens_are_in_tiers(plan):
    model = random_model("llama")
    cache, tokens = opened(model, plan), Tokens.random(model, 75, seed=1)
    feed(cache, [tokens])
    store = cache.compressed[1].store
    known = evaluated.knows_positions(store)
    assert known == (plan is not TIERS) and evaluated.kept(store, 0) == 1
    found = evaluated.stored(store, 0) if known else {}
    for role in found:
        given, positions = getattr(tokens, role)[1], found[role].positions
        assert torch.equal(positions.sort(1).values, torch.arange(SINKS, complete(plan, 75, 75)).expand_as(positions))
        if isinstance(store.tiers[0].plan.keys.codec, Exact):
            expected = given.gather(1, positions[..., None].expand(found[role].tokens.shape))
            torch.testing.assert_close(found[role].tokens, expected, rtol=1e-5, atol=1e-5)
