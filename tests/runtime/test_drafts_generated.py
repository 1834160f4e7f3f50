"""Prompt lookup and assisted decoding: what a cache holds afterwards, and that generation goes on."""

import oracle
import pytest
import torch
from cases import BY_NAME, CASES
from in_turn import in_turn
from layer_walk import Tokens, decoded, differing, forwards, stored
from release_limits import NO_SLIDING_DRAFTS, drafts_may_slide
from toy_models import SLIDING, draft_of, left_padded, random_model
from transformers import DynamicCache

from calib.runtime import compress
from calib.runtime.layer import CompressedLayer


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


class Replay:
    """Records queries, keys and values of each layer in every forward of a cache, without the tokens that `crop` rejects."""

    def __init__(self, cache, monkeypatch):
        self.cache = cache
        self.brought: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in cache.compressed]
        self.drafted = self.rejected = 0
        attend, crop = CompressedLayer.attend, type(cache).crop

        def attended(layer, query, mask, logits):
            self.brought[cache.compressed.index(layer)].append((query, *layer._arrived))
            return attend(layer, query, mask, logits)

        def cropped(cropped_cache, count):
            crop(cropped_cache, count)
            self.rejected -= count
            self.drafted += self.brought[0][-1][0].shape[2] - 1
            for forwards_of_layer in self.brought:
                last = forwards_of_layer[-1]
                forwards_of_layer[-1] = tuple(part[:, :, : part.shape[2] + count] for part in last)

        monkeypatch.setattr(CompressedLayer, "attend", attended)
        monkeypatch.setattr(type(cache), "crop", cropped)

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each forward that were kept."""
        return [query.shape[2] for query, _, _ in self.brought[0]]

    @property
    def tokens(self) -> Tokens:
        """All kept tokens of the only row."""
        layers = [[torch.cat(part, 2)[0] for part in zip(*layer, strict=True)] for layer in self.brought]
        return Tokens(*map(torch.stack, zip(*layers, strict=True)))


def assistants(model):
    """Ways of drafting: from the prompt, and by a copy of the model that is often wrong."""
    return {"prompt lookup": {"prompt_lookup_num_tokens": 4}, "assisted": {"assistant_model": draft_of(model, 6)}}


@pytest.mark.full
@pytest.mark.parametrize(("case", "way"), in_turn(CASES, ["prompt lookup", "assisted"]))
def test_generation_with_drafts_stores_the_accepted_tokens_alone(model, case, way, monkeypatch):
    """Afterwards the cache holds, bit for bit, what one-token forwards of the accepted tokens would have stored; or, where it
    matters which tokens come in one forward, the same forwards without the rejected tokens."""
    inputs = {"input_ids": left_padded([40])["input_ids"].repeat(1, 5)}  # a text that repeats itself invites lookups
    with case.open(model) as cache, monkeypatch.context() as patch:
        replay = Replay(cache, patch)
        found = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False, **assistants(model)[way]
        )
    length = cache.get_seq_length()
    assert length == found.shape[1] - 1 == cache.sequences.lengths[0] == sum(replay.sizes)
    assert 0 < replay.rejected < replay.drafted, "drafts must be both accepted and rejected"
    plain = case.open(model)
    plain.release()
    if case.by_forwards:
        forwards(plain, replay.tokens, replay.sizes)
    else:
        decoded(plain, replay.tokens, 200)
    assert not differing(stored(cache, 0), stored(plain, 0))


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
    """Past recording stays on when assisted decoding ends, which must not change a later turn."""
    inputs = {"input_ids": left_padded([40])["input_ids"].repeat(1, 4)}
    with BY_NAME["kivi-2-short"].open(model) as cache:
        first = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=4
        )
        assert cache.sequences.recording and cache.layers[0].record_past and cache.is_croppable
        held = oracle.contents(cache)
        second = model.generate(first, past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert torch.equal(second[:, : first.shape[1]], first) and second.shape[1] == first.shape[1] + 20
        assert cache.get_seq_length() == second.shape[1] - 1
        now = oracle.contents(cache)
    packed = cache.sequences.packed(first.shape[1] - 1)
    assert packed > 0
    for before, after in zip(held, now, strict=True):
        for old, new in zip(before[0][:2], after[0][:2], strict=True):
            assert torch.equal(new[:, :packed], old[:, :packed])


def test_the_next_generation_holds_no_drafts(model):
    """A later `generate` without drafts ends past recording, which transformers turned on for them: its prompt is stored at once,
    and the cache speculates again."""
    text, columns = left_padded([40])["input_ids"].repeat(1, 4), []
    with compress(model, "specache", k=16, residual=32) as cache:
        found = model.generate(
            text, past_key_values=cache, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=4
        )
        counting = model.register_forward_pre_hook(
            lambda _, __, named: columns.append((named["input_ids"].shape[1], cache.sequences.unconfirmed)),
            with_kwargs=True,
        )
        turn = torch.cat([found, text[:, :50]], 1)
        model.generate(turn, past_key_values=cache, max_new_tokens=4, do_sample=False)
        counting.remove()
        assert cache.sequences.lengths == [turn.shape[1] + 3]
    assert columns == [(51, 0), (1, 0), (2, 0), (2, 0), (2, 0)]  # the first guess is made from the true token alone


@pytest.mark.skipif(not drafts_may_slide(), reason=NO_SLIDING_DRAFTS)
def test_layers_beside_keep_their_window_alone_after_drafts():
    model, text = random_model("qwen3-mixed"), left_padded([40])["input_ids"].repeat(1, 4)
    with compress(model, "full") as cache:
        for drafts in (4, None):
            options = {"prompt_lookup_num_tokens": drafts} if drafts else {}
            text = model.generate(text, past_key_values=cache, max_new_tokens=30, do_sample=False, **options)
        assert cache.layers[1].keys.shape[2] == SLIDING - 1
    assert torch.equal(text, model.generate(text[:, :160], max_new_tokens=60, do_sample=False))
