"""What `calib tune` measures and chooses: losses against an oracle, bits against the runtime, allocations against all others."""

import itertools
import random

import pytest
import torch
from cases import calibrated_artifact
from one_line import message
from toy_language_model import toy_model, toy_tokenizer

from calib.errors import UsageError
from calib.evaluate.feed import Feed
from calib.evaluate.stored import stored
from calib.runtime import compress, special_token_ids
from calib.runtime.completed import completed
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.tune.allocation import cheapest, hull
from calib.tune.candidates import Candidate, candidates
from calib.tune.measure import Measured, Subject, measure
from calib.tune.result import Search

LENGTH = 160
# Relative tolerance: one side sums in float32, the other in float64.
LOSS = 2e-4

# For each method: options that leave a few candidates, and the options of one of these.
METHODS = {
    "kivi": ({"group": 32, "residual": 32, "statistics": "prompt", "clip": None}, {"bits": 2}),
    "zipcache": ({"ratio": 0.4, "clip": 1.0}, {"tiers": ((4, 0.5), (2, 0.5))}),
    "mikv": ({"ratio": 0.2, "important": 4}, {"retained": 2}),
    "h2o": ({"recent": 0.1}, {}),
    "gear": ({"outliers": 0.02, "bits": 2}, {"rank": 2}),
    "csr": ({"coefficients": 8, "window": 16}, {"sparsity": 4}),
}


@pytest.fixture(scope="module")
def subject():
    model = toy_model()
    return Subject.of(model, calibrated_artifact(model), seed=0)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 259, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def search_of(method, given, subject, batches, only=None):
    found = candidates(method, given, subject.layers, subject.geometry, subject.artifact, subject.model.dtype)
    found = [one for one in found if only is None or only(one)]
    return Search(method, found, measure(subject, batches, [one.plans for one in found]))


def settled(one):
    return {**one.options, **one.own}


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_bits_are_those_of_a_cache(method, subject, tokens):
    """Against a cache of the method, filled by the model: e^T W e token by token in float64, with W = T^T T and T klt's basis."""
    given, own = METHODS[method]
    search = search_of(method, given, subject, tokens.split(2), lambda one: one.own == own)
    one = search.candidates[-1]
    with compress(subject.model, method, subject.artifact, **settled(one)) as cache:
        for layer in cache.compressed:  # so that each slot says which token it holds
            if hasattr(layer.plan, "positions"):
                layer.plan = layer.plan.__class__(**{**vars(layer.plan), "positions": True})
        arrived = {}
        update = cache.update
        cache.update = lambda keys, values, layer, **rest: (
            arrived.setdefault(layer, (keys, values)) and update(keys, values, layer, **rest)
        )
        Feed(subject.model, cache)(tokens, only_last=True)
        artifact = subject.artifact
        for number, layer in enumerate(cache.compressed):
            expected = 0.0
            for part, role in enumerate(("keys", "values")):
                basis = artifact.tensors[f"{role}.klt.basis"][number].double()
                mean = artifact.tensors[f"{role}.klt.mean"][number].double()
                worth = basis.mT @ basis
                sums, coded = 0.0, 0
                for row in range(len(tokens)):
                    held, exact = stored(layer.store, row)[role], arrived[number][part][row].double()
                    sequences = layer.store.sequences
                    coded += (
                        LENGTH - sequences.exact(row, LENGTH)
                        if isinstance(sequences, TieredSequenceState)
                        else held.positions.shape[1]
                    )
                    for head, positions in enumerate(held.positions.tolist()):
                        left = dict(zip(positions, held.tokens[head].double(), strict=True))
                        for position in range(LENGTH):
                            if position in left:
                                error = exact[head, position] - left[position]
                            elif method == "h2o":
                                error = exact[head, position] - mean[head]
                            else:
                                continue
                            sums += float(error @ worth[head] @ error)
                expected += sums / coded
            assert search.measured.loss[number][-1] == pytest.approx(expected, rel=LOSS)
    with compress(subject.model, method, subject.artifact, **settled(one)) as cache:
        Feed(subject.model, cache)(tokens, only_last=True)
        marginal = cache.memory().marginal_bits
    bits = {row[-1] for row in search.measured.bits}
    assert len(bits) == 1
    if method in ("kivi", "zipcache", "csr"):
        assert bits.pop() == pytest.approx(marginal, rel=1e-12)
    else:  # a prompt's own share of important tokens, or its segment
        assert bits.pop() > marginal


def test_bits_of_a_budget_are_those_of_its_prompt(subject, tokens):
    """H2O: of 32-bit pairs what is kept, and the position of each; of 160 tokens 32 heavy and 16 recent."""
    search = search_of("h2o", {"recent": 0.1}, subject, [tokens], lambda one: one.options["heavy"] == 0.2)
    assert search.measured.bits[0][0] == pytest.approx((32 + 32 / 64) * 48 / LENGTH)


@pytest.mark.full
def test_one_batch_or_three(subject, tokens):
    one, three = (
        search_of("zipcache", {"ratio": 0.2, "clip": 1.0}, subject, tokens.split(size)).measured for size in (3, 1)
    )
    for a, b in zip(one.loss, three.loss, strict=True):
        assert a == pytest.approx(b, rel=LOSS)
    assert one.bits == three.bits


def brute_force(costs, errors, budget):
    every = itertools.product(*(range(len(part)) for part in costs))
    within = [pick for pick in every if sum(map(list.__getitem__, costs, pick)) <= budget * len(costs) + 1e-9]
    return min((sum(map(list.__getitem__, errors, pick)) for pick in within), default=None)


def test_allocation_beside_every_allocation():
    """Always within the budget; the best if a price of a bit spends it exactly, and else within 5 % of the best on average."""
    draw, gaps = random.Random(3), []
    for _ in range(60):
        costs = [[draw.choice((1, 1.5, 2, 2.5, 3, 4)) + draw.random() / 8 for _ in range(6)] for _ in range(3)]
        errors = [[draw.uniform(0.5, 2) * 4**-cost for cost in part] for part in costs]
        for budget in (1.2, 1.7, 2.3, 3.1, 9.0):
            best, found = brute_force(costs, errors, budget), cheapest(costs, errors, budget)
            assert (found is None) == (best is None)
            if found is None:
                continue
            assert sum(map(list.__getitem__, costs, found)) <= 3 * budget + 1e-9
            loss = sum(map(list.__getitem__, errors, found))
            assert loss >= best - 1e-12
            gaps.append(loss / best)
            spent = sum(map(list.__getitem__, costs, found)) / 3
            assert loss <= brute_force(costs, errors, spent) * 1.5
        for price in (0.01, 0.05, 0.2):  # the best choice at a price of a bit is the best within its own bits
            pick = [
                min(range(6), key=lambda n, c=c, e=e: e[n] + price * c[n]) for c, e in zip(costs, errors, strict=True)
            ]
            spent = sum(map(list.__getitem__, costs, pick)) / 3
            loss = sum(map(list.__getitem__, errors, cheapest(costs, errors, spent)))
            assert loss == pytest.approx(sum(map(list.__getitem__, errors, pick)))
    assert sum(gaps) / len(gaps) < 1.05


def test_no_single_setting_is_better():
    """The first layer's steepest step leaves the two others no room: one setting for all loses less within the same budget."""
    bits, loss = [[1.0, 2.0, 4.0]] * 3, [[15.0, 6.0, 0.0], [18.0, 12.0, 0.0], [19.0, 13.0, 4.0]]
    assert cheapest(bits, loss, 2.0) == [2, 0, 0]
    search = Search("rtn", [Candidate(0, {}, {"bits": n}, {}) for n in (1, 2, 4)], Measured(range(3), bits, loss))
    assert search.at(2.0).loss == search.uniform(2.0).loss == 31


def test_hull():
    costs, errors = [1, 2, 3, 4, 2, 5], [8.0, 6.0, 1.0, 0.5, 9.0, 0.7]
    assert hull(costs, errors) == [0, 2, 3]


def test_layers_differ_and_beat_one_setting(subject, tokens):
    given = {"group": 32, "residual": 32, "statistics": "prompt"}
    search = search_of("kivi", given, subject, [tokens])
    low, high = search.reach()
    assert low == pytest.approx(1 + 1) and high > 8
    for budget in (2.4, 3.3, 5.0):
        setting, one = search.at(budget), search.uniform(budget)
        assert setting.mean_bits <= budget + 1e-9 and setting.loss <= one.loss
    assert len({str(one.own) for one in search.at(3.3).chosen}) > 1
    front = search.front()
    assert [one.loss for one in front] == sorted((one.loss for one in front), reverse=True)
    assert front[0].mean_bits == pytest.approx(low) and front[-1].mean_bits == pytest.approx(high)
    with pytest.raises(UsageError) as error:
        search.at(1.5)
    assert message(error).startswith(f"--bits 1.5: 'kivi' takes 2.000 ... {high:.3f} bits per value")


def test_shared_options_are_the_same_in_every_layer(subject, tokens):
    given = {"clip": 1.0, "tiers": ((4, 0.5), (2, 0.5))}
    search = search_of("zipcache", given, subject, [tokens])
    for budget, ratio in ((4.1, 0.4), (3.45, 0.2), (9.0, 0.8)):
        chosen = search.at(budget).chosen
        assert [one.options["ratio"] for one in chosen] == [ratio] * 3


def test_special_tokens_are_those_of_the_tokenizer(subject):
    asked = (subject.layers, subject.geometry, subject.artifact, subject.model.dtype)
    given = {"probes": "special", "clip": 1.0, "ratio": 0.4}
    found = candidates("zipcache", given, *asked, lambda plans: completed(plans, subject.model, toy_tokenizer()))
    plans = [plan for one in found for plan in one.plans.values()]
    assert plans and all(plan.probes.special_ids == special_token_ids(toy_tokenizer()) for plan in plans)
    with pytest.raises(UsageError, match="give the ids, or the tokenizer that knows them"):
        candidates("zipcache", given, *asked)


def test_what_cannot_be_chosen(subject, tokens):
    asked = (subject.layers, subject.geometry, subject.artifact, subject.model.dtype)
    with pytest.raises(UsageError) as error:
        candidates("full", {}, *asked)
    assert message(error).startswith("method 'full' has no option that a budget could choose; one of csr, gear")
    with pytest.raises(UsageError) as error:
        candidates("klt", {}, *asked)
    assert message(error).startswith("method 'klt' needs no tuning: its option bits is a budget already")
    with pytest.raises(UsageError) as error:
        candidates("h2o", {"heavy": 0.1, "recent": 0.1}, *asked)
    assert "every option of 'h2o' that a budget could choose is given (heavy, recent)" in message(error)
    with pytest.raises(UsageError) as error:
        candidates("kivi", {"group": 24}, *asked)
    assert message(error).startswith("no combination of the options of 'kivi' is possible here: ")
    with pytest.raises(UsageError) as error:
        search_of("kivi", {}, subject, [tokens[:, :120]])  # of which the newest 128 stay exact
    assert message(error) == (
        "--length 120: a window of exact tokens leaves nothing to encode; give more than twice as many"
    )
