"""Unconfirmed tokens: while past recording is on, `crop` can reject a forward's tokens, and nothing of them remains."""

import oracle
import pytest
import torch
from cases import BY_NAME, CASES
from layer_walk import Tokens, decoded, differing, feed, forwards, stored
from tolerances import FLOAT32_ATTENTION, MEMORY
from toy_models import random_model

from calib.runtime.logits import Logits

pytestmark = pytest.mark.arithmetic

# After a prompt that has drafts itself: drafts of a forward, and how many of them are rejected (none, some, all).
STEPS = [(5, 3), (1, 0), (4, 4), (6, 0), (33, 1), (1, 0), (130, 100), (2, 1)]


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_stored_is_what_plain_decoding_stores(model, case):
    """Bit for bit, mass included. Where it matters which tokens come in one forward (`by_forwards`), plain decoding has the
    same forwards without the rejected tokens, else one token each. With offloading rejected tokens may have fetched pairs,
    which changes the order of sums: mass then has a tolerance."""
    tokens, near = Tokens.random(model, 300, seed=1), Tokens.random(model, 5, seed=2, magnitude=1000)
    # Huge enough to spoil whatever they touch: scales, maxima, sums of attention.
    poison = Tokens.random(model, 150, seed=2, magnitude=1e30)
    drafted, plain = case.open(model), case.open(model)
    drafted.release()
    plain.release()
    drafted.activate_past_recording()
    at, sizes = 120, [120]
    feed(drafted, [join(tokens[:at], near)])  # the first forward also decides the parameters' dtype
    drafted.crop(-5)
    for count, wrong in STEPS:
        kept = count - wrong
        feed(drafted, [join(tokens[at : at + kept], poison[:wrong])])
        drafted.crop(-wrong)
        at += kept
        sizes.append(kept)
        assert drafted.sequences.lengths == [at] and drafted.get_seq_length() == at
    forwards(plain, tokens, sizes if case.by_forwards else [120] + [1] * (at - 120))
    mass = FLOAT32_ATTENTION if case.on_host else 0
    assert not differing(stored(drafted, 0), stored(plain, 0), mass)
    assert drafted.memory().by_kind == plain.memory().by_kind


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rejected_drafts_change_nothing_of_what_others_attend(model, case):
    """Except in `infllm`, where all queries of a chunk choose the blocks that it fetches."""
    tokens, poison = Tokens.random(model, 161, seed=1), Tokens.random(model, 20, seed=2, magnitude=1000)
    drafted, plain = case.open(model), case.open(model)
    at, same = 0, True
    for cache in (drafted, plain):
        cache.release()
        cache.activate_past_recording()
    for kept, wrong in [(120, 5), (2, 3), (6, 1), (33, 20)]:
        accepted = tokens[at : at + kept]
        found, expected = feed(drafted, [join(accepted, poison[:wrong])]), feed(plain, [accepted])
        drafted.crop(-wrong)
        plain.crop(0)
        at += kept
        for (mine,), (other,) in zip(found, expected, strict=True):
            same &= bool((mine[:, :kept] - other).abs().max() <= FLOAT32_ATTENTION * other.abs().max())
    assert same == (case.method != "infllm")


def join(*parts: Tokens) -> Tokens:
    """These tokens one after the other."""
    return Tokens(*(torch.cat([getattr(part, n) for part in parts], 2) for n in ("queries", "keys", "values")))


@pytest.mark.parametrize(
    "name", ["full", "kivi-2-short", "rtn-4", "zipcache-short", "zipcache-16-4-2", "mikv-8-2", "h2o", "streaming_llm"]
)
def test_padded_rows_keep_their_own_drafts(model, name):
    tokens = [Tokens.random(model, 200, seed=seed) for seed in (3, 4)]
    cache, plain = BY_NAME[name].open(model), BY_NAME[name].open(model)
    cache.release()
    plain.release()
    cache.activate_past_recording()
    feed(cache, [tokens[0][:70], tokens[1][:40]])
    cache.crop(-20)
    assert cache.sequences.lengths == [50, 20] and cache.get_seq_length() == 50
    feed(cache, [tokens[0][50:60], tokens[1][20:25]])
    cache.crop(-7)  # of the second row's ten columns five are padding: it loses its five tokens
    assert cache.sequences.lengths == [53, 20]
    feed(plain, [tokens[0][:50], tokens[1][:20]])
    feed(plain, [tokens[0][50:53], tokens[1][:0]])
    for row in range(2):
        assert not differing(stored(cache, row), stored(plain, row), mass=0)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_crop_the_next_forward_confirms(case, model):
    tokens, cache, plain = Tokens.random(model, 170, seed=5), case.open(model), case.open(model)
    cache.release()
    plain.release()
    cache.activate_past_recording()
    decoded(cache, tokens, 150)
    decoded(plain, tokens, 150)
    assert cache.sequences.lengths == [169] and cache.sequences.unconfirmed == 1 and cache.get_seq_length() == 170
    cache.crop(0)
    assert not differing(stored(cache, 0), stored(plain, 0), mass=0)


def test_drafts_lie_in_no_page_and_no_window_and_are_weighed(model):
    cache = BY_NAME["kivi-2-short"].open(model)
    cache.release()
    cache.activate_past_recording()
    feed(cache, [Tokens.random(model, 300, seed=6)])
    assert cache.sequences.lengths == [0] and cache.sequences.table.rows == [[]]
    assert all(stream.pool.capacity == 0 for layer in cache.compressed for stream in layer.store.streams)
    memory = cache.memory()
    assert memory.measured_bytes == memory.predicted_bytes == memory.by_kind["window"] == 2 * 2 * 2 * 300 * 32 * 4
    cache.crop(-300)
    assert cache.memory().measured_bytes == 0 == cache.get_seq_length()


@pytest.mark.parametrize("name", ["zipcache", "mikv-8-2", "h2o", "streaming_llm", "oracle"])
def test_drafts_lie_in_no_tier_and_are_weighed(model, name):
    """A method that observes attention keeps the drafts' queries as well: it attends again once it is known which drafts stay."""
    cache, tokens = BY_NAME[name].open(model), Tokens.random(model, 420, seed=6)
    cache.release()
    feed(cache, [tokens[:100]])
    cache.activate_past_recording()
    held, pages = cache.memory(), [list(map(list, table.rows)) for table in cache.sequences.tables]
    feed(cache, [tokens[100:400]])
    drafted = cache.memory()
    heads = 2 + 2 + 4 * BY_NAME[name].observes  # keys, values, queries
    assert drafted.by_kind["window"] - held.by_kind["window"] == 2 * heads * 300 * 32 * 4
    assert abs(drafted.measured_bytes - drafted.predicted_bytes) <= MEMORY * drafted.predicted_bytes
    assert (
        cache.sequences.lengths == [100] and [list(map(list, table.rows)) for table in cache.sequences.tables] == pages
    )
    cache.crop(-300)
    assert cache.memory().by_kind == held.by_kind


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prompt_of_which_nothing_was_kept_is_none(model, case):
    """If `crop` keeps nothing of the first forward, the next one is the prompt: budgets, chunks and statistics follow from it."""
    cache, plain, tokens = case.open(model), case.open(model), Tokens.random(model, 150, seed=6)
    cache.release()
    plain.release()
    cache.activate_past_recording()
    feed(cache, [Tokens.random(model, 60, seed=7, magnitude=50)])
    cache.crop(-60)
    assert cache.sequences.lengths == [0] and cache.get_seq_length() == 0
    for one in (cache, plain):
        forwards(one, tokens, [100] + [1] * 30)
    cache.crop(0)
    assert not differing(stored(cache, 0), stored(plain, 0), mass=0)


@pytest.mark.parametrize("name", ["kivi-2-short", "streaming_llm", "h2o"])
def test_drafts_do_not_keep_a_fused_projection_alive(model, name):
    cache, fused = BY_NAME[name].open(model), torch.randn(1, 2, 40, 4 * 32)
    cache.release()
    cache.activate_past_recording()
    for layer in cache.compressed:
        layer.update(fused[..., 32:64], fused[..., 64:96])
        layer.attend(fused[..., 96:], None, Logits(0.2))
    heads = 2 + 2 + 2 * BY_NAME[name].observes
    memory = cache.memory()
    assert memory.measured_bytes == memory.predicted_bytes
    assert memory.by_kind["window"] == 2 * heads * 40 * 32 * 4
    drafts = [part.clone() for draft in cache.sequences.forward.drafts for part in draft.parts]
    fused.zero_()  # the model may reuse its memory
    assert all(map(torch.equal, drafts, [part for draft in cache.sequences.forward.drafts for part in draft.parts]))
    cache.crop(0)
    assert all(float(part.abs().min()) > 0 for held in oracle.contents(cache) for part in held[0][:2])


@pytest.mark.parametrize("name", ["kivi-2-short", "zipcache-short", "zipcache", "mikv-8-2"])
def test_rows_are_confirmed_before_they_are_reordered(model, name):
    tokens = [Tokens.random(model, 150, seed=seed) for seed in (7, 8)]
    cache = BY_NAME[name].open(model)
    cache.release()
    cache.activate_past_recording()
    feed(cache, tokens)
    cache.reorder_cache(torch.tensor([1, 1]))
    alone = BY_NAME[name].open(model)
    alone.release()
    feed(alone, [tokens[1]])
    for row in range(2):
        assert not differing(stored(cache, row), stored(alone, 0))


@pytest.mark.parametrize("stage", ["before any layer", "in the last layer"])
def test_an_interrupted_confirmation_is_noticed(model, monkeypatch, stage):
    cache, tokens = BY_NAME["kivi-2-short"].open(model), Tokens.random(model, 60, seed=9)
    cache.release()
    cache.activate_past_recording()
    feed(cache, [tokens[:50]])

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stage == "before any layer":
            patch.setattr(cache.sequences, "_take_in", interrupted)
        else:
            drafts = cache.sequences.forward.drafts
            drafts[1] = drafts[1]._replace(store=interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.crop(-3)
    for again in (lambda: cache.crop(0), lambda: feed(cache, [tokens[50:51]])):
        with pytest.raises(RuntimeError, match=r"interrupted.*cache\.reset\(\)"):
            again()
    cache.reset()
    feed(cache, [tokens])
    assert cache.sequences.lengths == [60] and not cache.sequences.recording
