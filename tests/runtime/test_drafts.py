"""Unconfirmed tokens: while past recording is on, a forward's tokens can be taken back without a trace."""

import copy

import oracle
import pytest
import torch
from cases import BY_NAME, CASES
from layer_walk import Tokens, feed, stored
from release_limits import NO_SLIDING_DRAFTS, drafts_may_slide
from toy_models import left_padded, random_model
from transformers import DynamicCache

from calib.runtime import compress
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits

# Drafts of a forward and how many of them are rejected, from a prompt that already holds some: all, some and none kept.
STEPS = [(5, 3), (1, 0), (4, 4), (6, 0), (33, 1), (1, 0), (130, 100), (2, 1)]


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def decoded(cache, tokens: Tokens, prompt: int) -> None:
    """The prompt, then every token in a forward of its own."""
    feed(cache, [tokens[:prompt]])
    for at in range(prompt, len(tokens)):
        feed(cache, [tokens[at : at + 1]])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_stored_is_what_plain_decoding_stores(model, case):
    tokens, rejected = Tokens.random(model, 300, seed=1), Tokens.random(model, 150, seed=2, magnitude=30)
    drafted, plain = case.open(model), case.open(model)
    drafted.release()
    plain.release()
    drafted.activate_past_recording()
    at = 120
    feed(drafted, [join(tokens[:at], rejected[:5])])
    drafted.crop(-5)
    for count, wrong in STEPS:
        kept = count - wrong
        feed(drafted, [join(tokens[at : at + kept], rejected[:wrong])])
        drafted.crop(-wrong)
        at += kept
        assert drafted.rows.lengths == [at] and drafted.get_seq_length() == at
    decoded(plain, tokens[:at], 120)
    expected, found = stored(plain, 0), stored(drafted, 0)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], part) for name, part in expected.items())
    assert drafted.memory().by_kind == plain.memory().by_kind


def join(*parts: Tokens) -> Tokens:
    """These tokens one after the other."""
    return Tokens(*(torch.cat([getattr(part, n) for part in parts], 2) for n in ("queries", "keys", "values")))


@pytest.mark.parametrize("name", ["full", "kivi-2-short", "rtn-4"])
def test_padded_rows_keep_their_own_drafts(model, name):
    tokens = [Tokens.random(model, 200, seed=seed) for seed in (3, 4)]
    cache, plain = BY_NAME[name].open(model), BY_NAME[name].open(model)
    cache.release()
    plain.release()
    cache.activate_past_recording()
    feed(cache, [tokens[0][:70], tokens[1][:40]])
    cache.crop(-20)
    assert cache.rows.lengths == [50, 20] and cache.get_seq_length() == 50
    feed(cache, [tokens[0][50:60], tokens[1][20:25]])
    cache.crop(-7)  # of the second row's ten columns five are padding: it loses its five tokens
    assert cache.rows.lengths == [53, 20]
    feed(plain, [tokens[0][:50], tokens[1][:20]])
    feed(plain, [tokens[0][50:53], tokens[1][:0]])
    for row in range(2):
        expected, found = stored(plain, row), stored(cache, row)
        assert all(torch.equal(found[field], part) for field, part in expected.items())


def test_without_crop_the_next_forward_confirms(model):
    tokens = Tokens.random(model, 220, seed=5)
    for case in CASES:
        cache, plain = case.open(model), case.open(model)
        cache.release()
        plain.release()
        cache.activate_past_recording()
        decoded(cache, tokens, 150)
        decoded(plain, tokens, 150)
        assert cache.rows.lengths == [219] and cache.rows.unconfirmed == 1 and cache.get_seq_length() == 220
        cache.crop(0)
        expected, found = stored(plain, 0), stored(cache, 0)
        assert all(torch.equal(found[field], part) for field, part in expected.items()), case


def test_drafts_lie_in_no_page_and_no_window_and_are_weighed(model):
    cache = BY_NAME["kivi-2-short"].open(model)
    cache.release()
    cache.activate_past_recording()
    feed(cache, [Tokens.random(model, 300, seed=6)])
    assert cache.rows.lengths == [0] and cache.rows.table.rows == [[]]
    assert all(stream.pool.capacity == 0 for layer in cache.compressed for stream in layer.store.streams)
    memory = cache.memory()
    assert memory.measured_bytes == memory.predicted_bytes == memory.by_kind["window"] == 2 * 2 * 2 * 300 * 32 * 4
    cache.crop(-300)
    assert cache.memory().measured_bytes == 0 == cache.get_seq_length()


def test_drafts_do_not_keep_a_fused_projection_alive(model):
    cache, fused = BY_NAME["kivi-2-short"].open(model), torch.randn(1, 2, 40, 3 * 32)
    cache.release()
    cache.activate_past_recording()
    for layer in cache.compressed:
        layer.update(fused[..., 32:64], fused[..., 64:])
        layer.attend(torch.randn(1, 4, 40, 32), None, Logits(0.2))
    assert cache.memory().measured_bytes == cache.memory().predicted_bytes == 2 * 2 * 2 * 40 * 32 * 4
    fused.zero_()  # the model's own memory is the model's again
    cache.crop(0)
    assert all(float(stream.window.tokens.abs().min()) > 0 for stream in cache.compressed[0].store.streams[1:])


def test_rows_are_confirmed_before_they_are_reordered(model):
    tokens = [Tokens.random(model, 150, seed=seed) for seed in (7, 8)]
    cache = BY_NAME["kivi-2-short"].open(model)
    cache.release()
    cache.activate_past_recording()
    feed(cache, tokens)
    cache.reorder_cache(torch.tensor([1, 1]))
    alone = BY_NAME["kivi-2-short"].open(model)
    alone.release()
    feed(alone, [tokens[1]])
    expected = stored(alone, 0)
    for row in range(2):
        found = stored(cache, row)
        assert all(torch.equal(found[field], part) for field, part in expected.items())


def test_an_interrupted_confirmation_is_noticed(model, monkeypatch):
    cache, tokens = BY_NAME["kivi-2-short"].open(model), Tokens.random(model, 60, seed=9)
    cache.release()
    cache.activate_past_recording()
    feed(cache, [tokens[:50]])

    def interrupted(*_):
        raise KeyboardInterrupt

    cache.rows.forward.drafts[1] = cache.rows.forward.drafts[1]._replace(store=interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.crop(-3)
    for again in (lambda: cache.crop(0), lambda: feed(cache, [tokens[50:51]])):
        with pytest.raises(RuntimeError, match=r"interrupted.*cache\.reset\(\)"):
            again()
    cache.reset()
    feed(cache, [tokens])
    assert cache.rows.lengths == [60] and not cache.rows.recording


# --- the same through generate() ----------------------------------------------------------------------------------


class Replay:
    """Writes down what every forward of a cache brought, and what of it `crop` kept."""

    def __init__(self, cache, monkeypatch):
        self.keys, self.values, self.last = {}, {}, {}
        self.drafted = self.rejected = 0
        update, crop = CompressedLayer.update, type(cache).crop

        def updated(layer, keys, values, *arguments, **options):
            for held, new in ((self.keys, keys), (self.values, values)):
                held[layer] = torch.cat([held[layer], new], 2) if layer in held else new
            self.last[layer] = keys.shape[2]
            return update(layer, keys, values, *arguments, **options)

        def cropped(cropped_cache, count):
            crop(cropped_cache, count)
            self.rejected -= count
            self.drafted += max(self.last.values()) - 1
            for held in (self.keys, self.values):
                for layer, tokens in held.items():
                    held[layer] = tokens[:, :, : tokens.shape[2] + count]

        monkeypatch.setattr(CompressedLayer, "update", updated)
        monkeypatch.setattr(type(cache), "crop", cropped)


def assistants(model):
    """Ways of drafting: from the prompt, and by a copy of the model that is often wrong."""
    draft = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * weight.std() * torch.randn_like(weight)) if weight.ndim > 1 else None
    draft.generation_config.num_assistant_tokens = 6
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return {"prompt lookup": {"prompt_lookup_num_tokens": 4}, "assisted": {"assistant_model": draft}}


@pytest.mark.parametrize("way", ["prompt lookup", "assisted"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_generation_with_drafts_stores_the_accepted_tokens_alone(model, case, way, monkeypatch):
    """Afterwards the cache holds, bit for bit, what one-token forwards of the accepted tokens would have stored."""
    inputs = {"input_ids": left_padded([40])["input_ids"].repeat(1, 5)}  # a text that repeats itself invites lookups
    with case.open(model) as cache, monkeypatch.context() as patch:
        replay = Replay(cache, patch)
        found = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False, **assistants(model)[way]
        )
    length = cache.get_seq_length()
    assert length == found.shape[1] - 1 == cache.rows.lengths[0]
    assert 0 < replay.rejected < replay.drafted, "drafts must be both accepted and rejected"
    plain = case.open(model)
    plain.release()
    parts = [torch.stack([held[layer][0] for layer in cache.compressed]) for held in (replay.keys, replay.values)]
    tokens = Tokens(torch.zeros(len(cache.compressed), 4, length, 32), *parts)
    decoded(plain, tokens, 200)
    expected, stored_now = stored(plain, 0), stored(cache, 0)
    assert all(torch.equal(stored_now[field], part) for field, part in expected.items())


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3-mixed", "gemma2"])
@pytest.mark.parametrize("way", ["prompt lookup", "assisted"])
def test_full_with_drafts_gives_the_tokens_of_the_dynamic_cache(family, way):
    if way == "assisted" and family != "llama" and not drafts_may_slide():
        pytest.skip(NO_SLIDING_DRAFTS)
    model = random_model(family)
    inputs = {"input_ids": left_padded([40])["input_ids"].repeat(1, 3)}
    options = {"max_new_tokens": 40, "do_sample": False, **assistants(model)[way]}
    expected = model.generate(**inputs, past_key_values=DynamicCache(config=model.config), **options)
    with compress(model, method="full") as cache:
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **options), expected)


def test_crop_of_nothing_is_always_allowed():
    model = random_model("qwen3-mixed")
    with compress(model, method="rtn") as cache:
        cache.crop(0)
        model(**left_padded([100]), past_key_values=cache)  # beyond the sliding layer's window
        cache.crop(0)
        assert cache.get_seq_length() == cache.get_seq_length(1) == 100


def test_plain_generation_goes_on_after_drafts(model):
    """Recording stays on when assisted decoding ends; a later turn must not notice."""
    inputs = {"input_ids": left_padded([40])["input_ids"].repeat(1, 4)}
    with BY_NAME["kivi-2-short"].open(model) as cache:
        first = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=4
        )
        assert cache.rows.recording and cache.layers[0].record_past and cache.is_croppable
        held = oracle.contents(cache)
        second = model.generate(first, past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert torch.equal(second[:, : first.shape[1]], first) and second.shape[1] == first.shape[1] + 20
        assert cache.get_seq_length() == second.shape[1] - 1
        now = oracle.contents(cache)
    packed = cache.rows.packed(first.shape[1] - 1)
    assert packed > 0
    for before, after in zip(held, now, strict=True):
        assert all(torch.equal(new[:, :packed], old[:, :packed]) for old, new in zip(before[0], after[0], strict=True))
