"""SnapKV against its rule in float64: the prompt's last queries vote, votes are pooled along positions, later tokens all stay."""

from dataclasses import dataclass
from functools import partial

import layer_walk
import pytest
import torch
from importance.layer import LayerOracle
from importance.prompt_votes import SnapKV
from importance.scenarios import OUTPUT, WALKS, Scenario, check_stored, others, walk_beside
from layer_walk import Tokens, differing, feed, forwards, stored
from toy_models import random_model

from calib.runtime import compress, methods
from calib.runtime.attend import attend
from calib.runtime.logits import Logits
from calib.runtime.methods import build
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.saliency import Accumulated, ObservationWindow
from calib.runtime.stages.selection import Tiering
from calib.runtime.stages.tiering import HeavyHitterBudget, PromptBudget, RatioTiers
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

pytestmark = pytest.mark.arithmetic


SCENARIOS = [
    others("snapkv", window=8),
    others("snapkv", window=8, pool=1),
    others("snapkv", window=8, pool=13, budget=0.5),
    others("snapkv", window=16, budget=60, gqa=1),
    others("snapkv", window=16, budget=60, gqa=4, pool=5),
    others("snapkv", budget=40, window=40),  # no room for any of the prefix
    others("snapkv"),  # a share that comes to less than the window
    others("snapkv", budget=50, window=1, pool=3),
    others("snapkv", budget=129, window=128, pool=7),  # of a prefix of two tokens one stays
    others("snapkv", budget=129, window=128, pool=1),
    others("snapkv", budget=1.0),
    others("snapkv", "short prompt", budget=20, window=8),
    others("snapkv", "short prompt", budget=100),  # shorter than the window
    others("snapkv", "short prompt", budget=19, window=5, pool=101),
    others("snapkv", "turns", window=8, pool=5),
    others("snapkv", "from one", budget=9, window=4),
    others("snapkv", "pages", budget=150, window=20),
    others("snapkv", "turns", window=8, pool=5, logits={"sliding": 48}),
    others("snapkv", budget=60, window=30, logits={"sliding": 20}),  # most tokens have no votes
    others("snapkv", budget=60, window=16, logits={"sliding": 137}),
    others("snapkv", "turns", gqa=4, budget=40, window=8, logits={"sliding": 48, "softcap": 6.0, "scale": 0.3}),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_it_does_what_the_papers_rule_says(scenario: Scenario):
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS[scenario.walk]), seed=scenario.tokens))


def test_a_prompt_under_a_soft_cap_votes_too(monkeypatch):
    """With a soft cap a prompt has no fast attention, and is attended in tiles of query rows."""
    monkeypatch.setattr(LayerOracle, "softcap", 5.0)
    monkeypatch.setattr(layer_walk, "Logits", partial(Logits, softcap=5.0))
    monkeypatch.setattr(attend, "QUERY_ROWS", 14)
    scenario = others("snapkv", "turns", window=10, budget=30)
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS[scenario.walk]), seed=scenario.tokens))


@pytest.mark.parametrize("pool", [1, 7])
def test_rows_of_any_length_do_not_hear_of_each_other_or_of_padding(pool):
    """Left-padded prompts of a batch: much longer than the budget, one token longer, as long, shorter, and a single token."""
    options = {"budget": 30, "window": 12, "pool": pool}
    model = random_model("llama", num_hidden_layers=1)
    rows = [Tokens.random(model, length + 25, seed=length) for length in (90, 31, 30, 20, 1)]
    cache = compress(model, "snapkv", **options)
    cache.release()
    oracles = [SnapKV(**options) for _ in rows]
    prompts = [len(tokens) - 25 for tokens in rows]
    steps = [(0, prompts)] + [(1, [1] * 5)] * 10 + [(0, [4, 1, 3, 2, 1])] + [(1, [1] * 5)] * 10
    at = [0] * len(rows)
    for _, counts in steps:
        new = [tokens[start : start + count] for tokens, start, count in zip(rows, at, counts, strict=True)]
        outputs = feed(cache, new)[0]
        for oracle, part, output in zip(oracles, new, outputs, strict=True):
            expected = oracle.forward(part.queries[0], part.keys[0], part.values[0])
            assert oracle.margin > 1e-4
            assert abs(output.double().numpy() - expected).max() <= OUTPUT * abs(expected).max()
        at = [start + count for start, count in zip(at, counts, strict=True)]
    store = cache.compressed[0].store
    for row, oracle in enumerate(oracles):
        assert store.counts(row) == [min(30, prompts[row]) + at[row] - prompts[row]] == [len(oracle.tokens(0)[0])]
        alone = compress(model, "snapkv", **options)
        alone.release()
        forwards(alone, rows[row][: at[row]], [counts[row] for _, counts in steps])
        assert not differing(stored(cache, row), stored(alone, 0))
        check_stored(alone.compressed[0].store, oracle)


def test_a_row_whose_prompt_comes_later_is_compressed_then():
    """Its first forward has no padding, and another row continues in it."""
    model = random_model("llama", num_hidden_layers=1)
    early, late = (Tokens.random(model, 120, seed=seed) for seed in (3, 4))
    options = {"budget": 20, "window": 8}
    cache = compress(model, "snapkv", **options)
    cache.release()
    feed(cache, [early[:50], late[:0]])
    feed(cache, [early[50:110], late[:60]])
    feed(cache, [early[110:111], late[60:61]])
    for row, (tokens, sizes) in enumerate(((early[:111], [50, 60, 1]), (late[:61], [60, 1]))):
        alone = compress(model, "snapkv", **options)
        alone.release()
        forwards(alone, tokens, sizes)
        assert not differing(stored(cache, row), stored(alone, 0))
    assert [cache.compressed[0].store.counts(row) for row in (0, 1)] == [[20 + 61], [20 + 1]]


def test_in_chunks_the_first_one_is_the_prompt():
    model = random_model("llama", num_hidden_layers=1)
    cache = compress(model, "snapkv", budget=20, window=8)
    cache.release()
    forwards(cache, Tokens.random(model, 200, seed=2), [50, 50, 100])
    assert cache.compressed[0].store.counts(0) == [20 + 150]
    assert cache.memory().marginal_bits == 32.0  # a float32 model


def test_pooling_keeps_the_neighbours_of_a_token_that_is_attended():
    """One token has all votes: pooled with a kernel of five its two neighbours on either side have as many."""
    votes = torch.zeros(1, 20)
    votes[0, 9] = 1.0
    assert ObservationWindow(4, 5).scores(votes, torch.ones(20))[0].nonzero()[:, 0].tolist() == [7, 8, 9, 10, 11]
    assert torch.equal(ObservationWindow(4, 1).scores(votes, torch.ones(20)), votes)
    assert torch.equal(ObservationWindow(4, 2**30 - 1).scores(votes, torch.ones(20)), torch.ones(1, 20))
    ends = torch.tensor([[[-3.0, -1.0, -2.0]]])  # positions beyond the ends do not count as votes of 0
    assert torch.equal(ObservationWindow(4, 3).scores(ends, torch.ones(3)), torch.tensor([[[-1.0, -1.0, -1.0]]]))


@dataclass(frozen=True)
class Chosen:
    """A method with this tiering, the accumulated attention of all rows as saliency, and stored positions."""

    tiering: Tiering
    shared: bool

    def plan(self, layer, geometry, artifact):
        tier = TierPlan(TierStages(Identity(), Exact()), TierStages(Identity(), Exact()))
        return TieredPlan((tier,), self.tiering, Accumulated(), shared_across_heads=self.shared, positions=True)


@pytest.mark.parametrize("shared", [False, True], ids=["each head", "one set"])
def test_any_saliency_may_choose_from_a_prompt(shared, monkeypatch):
    """With H2O's saliency `PromptBudget` keeps the tokens of a prompt that H2O's own budget keeps."""
    monkeypatch.setitem(methods.METHODS, "chosen", Chosen)
    model = random_model("llama", num_hidden_layers=1)
    kept = []
    for tiering in (PromptBudget(30, recent=10), HeavyHitterBudget(heavy=20, recent=10)):
        cache = compress(model, "chosen", tiering=tiering, shared=shared)
        cache.release()
        feed(cache, [Tokens.random(model, 80, seed=5)])
        kept.append(cache.compressed[0].store.positions(0, 0).sort(-1).values)
    assert torch.equal(*kept) and bool((kept[0] == kept[0][:1]).all()) == shared


@pytest.mark.parametrize("tiering", [HeavyHitterBudget(4, 4), RatioTiers((1.0,), 8)])
def test_pooling_is_refused_where_tokens_lie_in_any_order(tiering):
    stages = TierStages(Identity(), Exact())
    plan = TieredPlan((TierPlan(stages, stages),), tiering, ObservationWindow(8, 7))
    with pytest.raises(ValueError, match="ObservationWindow needs tokens in their order") as error:
        plan.check(64, torch.float32)
    assert "\n" not in str(error.value)


WRONG = [
    *(({"window": wrong}, ["window", "at least 1", repr(wrong), "32"]) for wrong in (0, -1, 1.5, "8", True, None)),
    *(({"pool": wrong}, ["pool", "odd number", "at least 1", repr(wrong)]) for wrong in (0, -1, 2, 8, 2.5, "7", True)),
    *(
        ({"budget": wrong}, ["whole number from 1", "above 0, to 1.0", repr(wrong), "0.2 of the prompt"])
        for wrong in (0, 0.0, -1, 1.5, "10", True, None)
    ),
    ({"budget": 31}, ["budget must be at least the window of 32 tokens", "31", "smaller window"]),
    ({"budget": 8, "window": 9}, ["window of 9 tokens", "8"]),
    ({"window": 2**31}, ["window", "at most"]),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=str)
def test_wrong_options_are_refused_in_one_line(options, words):
    with pytest.raises(ValueError, match="must be") as error:
        build("snapkv", options)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value
