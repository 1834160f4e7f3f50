"""The option `policy` of `mikv` and `h2o`: which query rows are scored, what each head chooses, padded rows, drafts, key ranges.
`test_importance` compares the tokens that are kept with float64."""

from collections import Counter
from dataclasses import replace
from functools import partial

import layer_walk
import numpy as np
import pytest
import torch
from cases import BY_NAME, calibrated_artifact
from importance.layer import LayerOracle
from importance.policies import Policy
from importance.scenarios import IDS, SCENARIOS, WALKS, oracle_of, others, walk_beside
from layer_walk import Tokens, differing, feed, stored
from one_line import message
from toy_models import left_padded, random_model

from calib.kernels.probe_saliency import operation
from calib.runtime import compress
from calib.runtime.logits import Logits
from calib.runtime.messages.artifact_error import ArtifactError
from calib.runtime.methods import build
from calib.runtime.methods.contract import Geometry
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.saliency import Accumulated, FastGen, Normalised, Probes
from calib.runtime.stages.saliency.fastgen import FREQUENT, PINNED, SPECIAL
from calib.runtime.stages.transform import ChannelRange, Identity
from calib.runtime.tiered import store

GEOMETRY = Geometry(2, 2, 32)
METHODS = ("mikv", "h2o")


def rows_scored(monkeypatch, model, method: str, tokens: int, **options) -> int:
    """Query rows that are scored in a prompt, over all layers."""
    counts = []

    def counting(query, keys, positions, *rest):
        counts.append(len(positions))
        return operation.attention_mass(query, keys, positions, *rest)

    monkeypatch.setattr(store, "attention_mass", counting)
    with compress(model, method, **options) as cache, torch.no_grad():
        model(torch.arange(tokens)[None] % 90 + 3, past_key_values=cache)
    return sum(counts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 200),
        ({"policy": "normalised"}, 20),
        ({"policy": "normalised", "probes": "all"}, 200),
        ({"probes": "recent", "probe_share": 0.25}, 50),
        ({"policy": "local"}, 0),
        ({"policy": "fastgen"}, 40),  # once for the sums, once for what locality recovers
        ({"policy": "fastgen", "special_ids": [5]}, 80),
    ],
    ids=str,
)
def test_of_a_prompt_only_the_probe_rows_are_scored(monkeypatch, method, options, expected):
    model = random_model("llama", num_hidden_layers=1)
    assert rows_scored(monkeypatch, model, method, 200, **options) == expected


@pytest.mark.arithmetic
@pytest.mark.parametrize("method", METHODS)
def test_what_each_policy_asks_for(method):
    asked = {
        "accumulated": (Accumulated(), None),
        "normalised": (Normalised(), Probes()),
        "local": (None, None),
        "fastgen": (FastGen(0.95), Probes()),
    }
    for policy, (saliency, probes) in asked.items():
        plan = build(method, {"policy": policy}).plan(0, GEOMETRY, None)
        assert (plan.saliency, plan.probes, plan.tiering.local) == (saliency, probes, policy == "local")
        assert not plan.needs_token_ids
    default, plain = (build(method, options).plan(0, GEOMETRY, None) for options in ({}, {"probes": "all"}))
    assert (default.saliency, default.probes) == (plain.saliency, plain.probes) == (Accumulated(), None)
    for options in ({"policy": "fastgen"}, {"policy": "normalised", "probes": "special"}):
        assert build(method, options | {"special_ids": [3]}).plan(0, GEOMETRY, None).needs_token_ids


@pytest.mark.arithmetic
def test_the_scenarios_of_fastgen_choose_every_policy_and_heads_differ():
    chosen, apart = Counter(), 0
    for scenario in SCENARIOS:
        if scenario.options.get("policy") != "fastgen":
            continue
        model, prompt = scenario.model(), WALKS[scenario.walk][0]
        tokens = Tokens.random(model, sum(WALKS[scenario.walk]), seed=scenario.tokens)
        layer = oracle_of(scenario, model, None, 0)
        drawn = torch.randint(0, IDS, (1, len(tokens)), generator=torch.Generator().manual_seed(scenario.tokens))
        layer.policy.ids = drawn[0, :prompt].numpy()
        layer.forward(tokens.queries[0][:, :prompt], tokens.keys[0][:, :prompt], tokens.values[0][:, :prompt])
        chosen.update(layer.policy.heads)
        apart += len(set(layer.policy.heads)) > 1
    assert len(chosen) == 4 and apart >= 3, chosen


# --- FastGen by hand ------------------------------------------------------------------------------------------------


def attention(kind: str, total: int = 20) -> np.ndarray:
    """Attention of one head `[total, total]`: a row gives all to itself, or 2/5 of it to token 3 or to the special token 5."""
    rows = np.eye(total)
    for row in range(total):
        to = {"local": row, "frequent": min(row, 3), "special": min(row, 5)}[kind]
        rows[row] *= 0.6
        rows[row, to] += 0.4
    return rows


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("kind", "special_ids", "expected"),
    [
        ("local", (), 0),
        ("local", (7,), 0),
        ("special", (), FREQUENT),
        ("special", (7,), SPECIAL),
        ("frequent", (7,), FREQUENT),
    ],
)
def test_a_head_takes_the_cheapest_policy_that_recovers_enough(kind, special_ids, expected):
    rows, total = attention(kind), 20
    ids = np.where(np.arange(total) == 5, 7, 1)

    def within(window: int) -> torch.Tensor:
        back = np.subtract.outer(np.arange(total), np.arange(total))
        return torch.tensor((rows * (back < window)).sum(0))[None]

    special = torch.tensor(ids == 7) if special_ids else None
    found = FastGen(0.95, special_ids).chosen(torch.tensor(rows.sum(0))[None], within, special, 1, 2)
    assert found.tolist() == [expected]
    oracle = Policy("fastgen", special_ids=special_ids)
    oracle.ids = ids
    assert oracle.chosen(rows, list(range(total)), 1, 2) == (bool(expected & SPECIAL), bool(expected & FREQUENT))


def test_a_pinned_token_stays_and_the_others_go_by_age(monkeypatch):
    """A head with the policy of locality and special tokens always keeps the special ones, and otherwise the newest."""
    monkeypatch.setattr(
        FastGen, "chosen", lambda saliency, mass, *_: torch.full(mass.shape[:1], SPECIAL, dtype=torch.uint8)
    )
    scenario = others("h2o", policy="fastgen", heavy=4, recent=6, special_ids=(9,))
    model = scenario.model()
    tokens, cache, at = Tokens.random(model, 90, seed=3), compress(model, "h2o", **scenario.options), 0
    cache.release()
    ids = torch.ones(1, 90, dtype=torch.long)
    ids[0, [2, 11, 70]] = 9
    for size in [60] + [1] * 30:
        cache.sequences.ids = ids[:, at : at + size]
        feed(cache, [tokens[at : at + size]])
        at += size
    own = cache.compressed[0].store
    assert own.policies.tolist() == [[SPECIAL] * 2]
    assert own.positions(0, 0).sort(-1).values.tolist() == [[2, 11, 70, *range(83, 90)]] * 2
    assert (own.mass[0, :, :10] == PINNED).sum(-1).tolist() == [3, 3]


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    "scenario",
    [
        others("mikv", "turns", policy="normalised", important=4, tokens=7),
        others("h2o", "turns", policy="fastgen", recovery=0.5, special_ids=(3, 7), tokens=7),
        others("mikv", "turns", policy="local", tokens=7),
    ],
    ids=str,
)
def test_probes_of_a_prompt_with_a_soft_cap(scenario, monkeypatch):
    """With a soft cap a prompt is attended as later forwards are: all query rows are computed, and weights select the probes."""
    cap = 5.0
    monkeypatch.setattr(LayerOracle, "softcap", cap)
    monkeypatch.setattr(layer_walk, "Logits", partial(Logits, softcap=cap))
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS["turns"]), seed=scenario.tokens))


def test_fastgen_with_ids_needs_ids():
    model = random_model("llama")
    embeds = model.get_input_embeddings()(left_padded([30])["input_ids"])
    with compress(model, "h2o", policy="fastgen", special_ids=[5]) as cache, torch.no_grad():
        asked = pytest.raises(ValueError, match=r"policy='fastgen' with special_ids needs token ids.*input_ids")
        with asked as error:
            model(inputs_embeds=embeds, past_key_values=cache)
        message(error)


# --- rows, drafts, files --------------------------------------------------------------------------------------------

CASES = ["mikv-normalised", "mikv-channel", "mikv-fastgen"]


def generated(case, model, inputs, count: int = 25):
    with case.open(model) as cache:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=count, do_sample=False)
    return cache


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_row_among_padding_keeps_what_it_keeps_alone(name):
    """Each row is treated by its own ids; padding has the id of a special token."""
    model, lengths = random_model("llama"), [60, 41, 33]
    inputs = left_padded(lengths, seed=4)
    inputs["input_ids"][inputs["attention_mask"] == 0] = 5
    together = generated(BY_NAME[name], model, inputs)
    for row, length in enumerate(lengths):
        own = {part: value[row : row + 1, -length:] for part, value in inputs.items()}
        alone = generated(BY_NAME[name], model, own)
        for mine, other in zip(together.compressed, alone.compressed, strict=True):
            for tier in (0, 1):
                found, expected = (one.store.positions(at, tier) for one, at in ((mine, row), (other, 0)))
                assert torch.equal(found, expected), (row, tier)
            if name == "mikv-fastgen":
                assert torch.equal(mine.store.policies[row], other.store.policies[0])


@pytest.mark.parametrize("name", CASES)
def test_rejected_drafts_leave_no_trace(name):
    model, inputs, caches = random_model("llama"), left_padded([50], seed=4)["input_ids"], []
    for draft in ([], [5, 17, 5, 60]):
        with BY_NAME[name].open(model) as cache, torch.no_grad():
            if draft:
                cache.activate_past_recording()
            model(torch.cat([inputs, torch.tensor([draft], dtype=torch.long)], 1), past_key_values=cache)
            cache.crop(-len(draft))
        caches.append(cache)
    assert caches[0].sequences.lengths == caches[1].sequences.lengths == [50]
    assert not differing(stored(caches[1], 0), stored(caches[0], 0))


# --- keys by channel ------------------------------------------------------------------------------------------------


def test_keys_by_channel_lie_in_the_artifacts_ranges():
    model = random_model("llama")
    artifact, options = calibrated_artifact(model), {"statistics": "calibrated", "keys": "channel", "clip": 0.9}
    for layer in range(2):
        plan = build("mikv", options | {"important": 4}).plan(layer, Geometry.of(model.config), artifact)
        for tier, bits in zip(plan.tiers, (4, 2), strict=True):
            ranges, codec = tier.keys.transform, tier.keys.codec
            assert type(ranges) is ChannelRange and (codec.bits, codec.group, codec.clip) == (bits, None, 0.9)
            low, high = (artifact.tensors[f"keys.{end}"][layer] for end in ("low", "high"))
            assert torch.equal(ranges.center[:, 0], (high + low) / 2)
            assert type(tier.values.transform) is Identity
        exact = build("mikv", options).plan(layer, Geometry.of(model.config), artifact).tiers[0]
        assert type(exact.keys.transform) is Identity and type(exact.keys.codec) is Exact
    without = replace(artifact, tensors={n: t for n, t in artifact.tensors.items() if n != "keys.low"})
    with pytest.raises(ArtifactError, match=r"^method 'mikv' needs tensor 'keys\.low', which is not") as error:
        compress(model, "mikv", without, **options)
    message(error)
