"""ZipCache with `probes="special"`, through a model: each row's probe queries are those of its special tokens; and which ids a
tokenizer gives."""

import pytest
import torch
from cases import BY_NAME
from layer_walk import differing, stored
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from toy_models import left_padded, random_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from calib.runtime import compress, special_token_ids
from calib.runtime.attend.attend import QUERY_ROWS
from calib.runtime.attend.attention_stats import ChunkWeights
from calib.runtime.layer import CompressedLayer

BLOCK = 32
SPECIAL = [5, 17, 60]
# A quarter is kept exactly, so that the selection can be read off.
OPTIONS = {"recompress": BLOCK, "tiers": [[16, 0.25], [0, 0.75]], "probes": "special", "special_ids": SPECIAL}
# Selections closer than this, relative to the larger score, might be made otherwise in float32.
CLEAR = 1e-4


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def ragged(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Prompts with some special tokens at different positions in each row; padding has the id of one, too."""
    inputs = left_padded(lengths, seed=4)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ids[torch.isin(ids, torch.tensor(SPECIAL))] = 2
    for row, length in enumerate(lengths):
        for position, token in zip(range(3 + row, length, 11 + row), SPECIAL * 9, strict=False):
            ids[row, ids.shape[1] - length + position] = token
    ids[mask == 0] = SPECIAL[0]
    return inputs


def salient(query: torch.Tensor, keys: torch.Tensor, probes: torch.Tensor) -> list[set[int]]:
    """The quarter of tokens that each KV head keeps: eq. 8 over the query rows `probes`, in float64.

    `query [heads, n, D]`, `keys [kv_heads, n, D]`.
    """
    group, total = query.shape[0] // keys.shape[0], keys.shape[1]
    logits = query.double() @ keys.double().repeat_interleave(group, 0).mT * query.shape[2] ** -0.5
    logits.masked_fill_(torch.ones(total, total, dtype=torch.bool).triu(1), -torch.inf)
    mass = logits.softmax(-1)[:, probes].unflatten(0, (-1, group)).sum((1, 2))
    seen = (probes[:, None] >= torch.arange(total)).sum(0)
    scores, kept = mass / seen.clamp(min=1), total // 4
    order = scores.argsort(dim=-1, descending=True, stable=True)
    last, first = (scores.gather(1, order[:, at : at + 1]) for at in (kept - 1, kept))
    assert bool((last - first > CLEAR * last).all() or (last == 0).all()), "take other tokens"
    return [set(head.tolist()) for head in order[:, :kept]]


@pytest.mark.parametrize("lengths", [[60], [60, 41, 33], [33, 80], [60, 60, 60]], ids=str)
def test_rows_of_special_tokens_are_the_probes(model, lengths, monkeypatch):
    inputs, brought = ragged(lengths), []
    attend = CompressedLayer.attend

    def attended(layer, query, mask, logits):
        brought.append((query, *layer._arrived))
        return attend(layer, query, mask, logits)

    monkeypatch.setattr(CompressedLayer, "attend", attended)
    with compress(model, method="zipcache", **OPTIONS) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
    for layer, (query, keys, _) in zip(cache.compressed, brought, strict=True):
        for row, length in enumerate(lengths):
            real = slice(query.shape[2] - length, None)
            special = torch.isin(inputs["input_ids"][row, real], torch.tensor(SPECIAL)).nonzero()[:, 0]
            assert 2 < len(special) < length / 4
            expected = salient(query[row, :, real], keys[row, :, real], special)
            ((held, _),) = layer.store.decoded(row)
            for head in range(2):
                given = keys[row, head, real]
                found = [int((given == token).all(1).nonzero()[0, 0]) for token in held[head]]
                assert set(found) == expected[head] and len(found) == length // 4


def test_a_prompt_without_any_special_token_goes_by_position(model):
    """Without probe rows every score is 0, and ties go to the earlier token."""
    inputs = left_padded([40], seed=4)
    ids = inputs["input_ids"].clamp(min=61)
    with compress(model, method="zipcache", **OPTIONS) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        with compress(
            model, method="zipcache", **OPTIONS | {"tiers": [[16, 1.0]], "probes": "all", "special_ids": []}
        ) as whole:
            model(ids, past_key_values=whole)
    for mine, other in zip(cache.compressed[:1], whole.compressed[:1], strict=True):
        ((kept, _),), ((keys, _),) = mine.store.decoded(0), other.store.decoded(0)
        assert torch.equal(kept, keys[:, :10])


@pytest.mark.full
def test_blocks_have_probes_by_position(model):
    """A prompt shorter than a block begins one, and ids of generated tokens are not used: probes are those of random+recent."""
    inputs, held = ragged([20, 9]), []
    for options in (OPTIONS, OPTIONS | {"probes": "random+recent", "special_ids": []}):
        with compress(model, method="zipcache", **options) as cache:
            model.generate(**inputs, past_key_values=cache, max_new_tokens=70, do_sample=False)
        held.append([stored(cache, row) for row in range(2)])
    assert not any(differing(*pair, mass=0) for pair in zip(*held, strict=True))
    assert cache.compressed[0].store.counts(0) == [16]


def test_rejected_drafts_are_no_probes(model):
    """Special tokens in the columns of a prompt that `crop` rejects are no probes."""
    inputs, caches = ragged([50]), []
    for draft in ([], SPECIAL * 2):
        with compress(model, method="zipcache", **OPTIONS) as cache, torch.no_grad():
            if draft:
                cache.activate_past_recording()
            model(torch.cat([inputs["input_ids"], torch.tensor([draft], dtype=torch.long)], 1), past_key_values=cache)
            cache.crop(-len(draft))
        caches.append(cache)
    assert caches[0].sequences.lengths == caches[1].sequences.lengths == [50]
    assert not differing(stored(caches[1], 0), stored(caches[0], 0))


def test_two_caches_hear_their_own_tokens(model):
    """Token ids are passed to every cache that uses them, and each forward uses its own."""
    first, second = ragged([40]), ragged([64])
    alone = []
    for inputs in (first, second):
        with compress(model, method="zipcache", **OPTIONS) as cache, torch.no_grad():
            model(**inputs, past_key_values=cache)
        alone.append(stored(cache, 0))
    with compress(model, method="zipcache", **OPTIONS) as one, compress(model, method="zipcache", **OPTIONS) as other:
        with torch.no_grad(), BY_NAME["rtn-4"].open(model) as deaf:
            model(**second, past_key_values=other)
            model(**first, past_key_values=deaf)
            model(**first, past_key_values=one)
        assert one.sequences.ids is None and other.sequences.ids is None, "no ids are kept beyond the forward"
    assert not differing(stored(one, 0), alone[0]) and not differing(stored(other, 0), alone[1])


# --- ids from a tokenizer -----------------------------------------------------------------------------------------------

WORDS = {
    "punctuation": [".", ",", "...", " ;", '("', "$", "\u2014", "\u3002", "\u00bf"],
    "others": ["\n", " ", "a", "a.", "3", "1,000", "\u20ac", "\u00e9", "\ufffd", "don't"],
}


def tokenizer_of(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    """One token a word, at random positions of a vocabulary as long as the model's, and the `special` ones among them."""
    places = torch.randperm(100, generator=torch.Generator().manual_seed(3)).tolist()
    spelled = [*words, *special.values(), *(f"word{n}" for n in range(100))][:100]
    vocabulary = dict(zip(spelled, places, strict=True)) | {"[rest]": 100}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="[rest]")), **special)


@pytest.fixture
def tokenizer():
    return tokenizer_of(WORDS["punctuation"] + WORDS["others"], bos_token="<s>", eos_token="</s>")


def test_special_and_punctuation_tokens(tokenizer):
    """Special tokens that the tokenizer names, tokens that were added as special, and tokens of punctuation alone."""
    expected = [*WORDS["punctuation"], "<s>", "</s>"]
    assert special_token_ids(tokenizer) == tuple(sorted(map(tokenizer.get_vocab().get, expected)))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["->", "and so on"])
    expected += ["<|im_start|>", "->"]
    assert special_token_ids(tokenizer) == tuple(sorted(map(tokenizer.get_vocab().get, expected)))


def test_special_tokens_of_the_embedded_model():
    """A byte-level BPE tokenizer: a punctuation mark counts with a space before it as well."""
    tokenizer = AutoTokenizer.from_pretrained("artifacts/tiny-llama")
    spelled = set(tokenizer.convert_ids_to_tokens(special_token_ids(tokenizer)))
    assert {"<s>", "</s>", "<pad>", ".", ",", ").", '\u0120"', "\u0120\u00e2\u0122\u0136"} < spelled
    assert not {"\u010a", "\u0120", "\u0120a", "\u0120the", "1"} & spelled


def test_ids_of_the_tokenizer_are_those_given_by_hand(model, tokenizer):
    inputs, held = ragged([60, 41]), []
    asked = {name: value for name, value in OPTIONS.items() if name != "special_ids"}
    ids = list(special_token_ids(tokenizer))
    assert 2 < torch.isin(inputs["input_ids"][0], torch.tensor(ids)).sum() < 15
    low = {"low": {"method": "zipcache", **asked, "tiers": [[4, 0.5], [2, 0.5]]}, "k": 4}
    for method, options in (
        ("zipcache", {**asked, "special_ids": ids}),
        ("zipcache", {**asked, "tokenizer": tokenizer}),
        ("zipcache", OPTIONS),
        ("specache", {**low, "tokenizer": tokenizer}),
    ):
        with compress(model, method=method, **options) as cache, torch.no_grad():
            model(**inputs, past_key_values=cache)
        if method == "zipcache":
            held.append([stored(cache, row) for row in range(2)])
    by_hand, asked_for, others = held
    assert not any(differing(*pair) for pair in zip(by_hand, asked_for, strict=True))
    assert any(differing(*pair) for pair in zip(by_hand, others, strict=True))


def test_ids_that_are_given_are_not_asked_for(model, tokenizer):
    """A list of ids is used whatever the tokenizer says; with probes that are not special the tokenizer changes nothing."""
    for options in (OPTIONS, {"probes": "recent"}):
        plans = []
        for more in ({}, {"tokenizer": tokenizer}):
            with compress(model, method="zipcache", **options, **more) as cache:
                plans.append(cache.compressed[0].plan)
        assert plans[0].probes == plans[1].probes


def test_what_is_no_tokenizer_is_refused(model):
    asked = {"method": "zipcache", "probes": "special"}
    with pytest.raises(ValueError, match="tokenizer must be a tokenizer of transformers, got 'gpt2'; AutoTokenizer"):
        compress(model, **asked, tokenizer="gpt2")
    with pytest.raises(ValueError, match="of 101 tokens, has no special and no punctuation tokens; give their ids"):
        compress(model, **asked, tokenizer=tokenizer_of(["a", "b"]))
    with pytest.raises(ValueError, match=r"special_ids=\[\]: give the ids, or the tokenizer that knows them: compress"):
        compress(model, **asked)


@pytest.mark.full
@torch.no_grad()
def test_weights_of_a_later_turn_are_made_for_some_of_its_queries(model, monkeypatch):
    """For all of them they would take as much memory as the attention matrix."""
    made, of = [], ChunkWeights.of
    monkeypatch.setattr(ChunkWeights, "of", lambda weights, queries: made.append(queries) or of(weights, queries))
    turn = torch.randint(0, 64, (2, QUERY_ROWS), generator=torch.Generator().manual_seed(0))
    with compress(model, method="zipcache", recompress=BLOCK) as cache:
        model(**left_padded([40, 25]), past_key_values=cache)
        model(turn, past_key_values=cache)
    layers = len(cache.compressed)
    assert len(made) > layers
    assert sum(map(len, made)) == layers * QUERY_ROWS
    assert max(map(len, made)) < QUERY_ROWS


def test_a_probe_weighs_the_tokens_of_its_own_chunk():
    chunks, probes = torch.tensor([[0, 0, 4, 4, 4], [-1, 2, 2, 5, 5]]), torch.tensor([[True, False], [True, True]])
    weights = ChunkWeights(chunks, probes)
    wanted = torch.tensor([[[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]]).float()
    assert torch.equal(weights.of(range(2)), wanted)
    assert torch.equal(weights.of(range(1, 2)), wanted[:, 1:])
