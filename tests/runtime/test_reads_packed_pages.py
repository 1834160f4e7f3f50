"""Attention reads the packed words: overwriting one changes the output, and generation does not decode pages."""

from functools import partialmethod

import pytest
import torch
from cases import CASES
from toy_models import left_padded, random_model

from calib.runtime.offload.store import OffloadStore
from calib.runtime.paging.pages import TILE_TOKENS
from calib.runtime.stages.codec import Corrected, UniformQuant
from calib.runtime.stages.contract import Codec
from calib.runtime.tiered.store import TieredStore

PROMPT = 300  # whole pages even behind a window of 128 tokens


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def next_logits(model, cache, inputs):
    """The logits of one more token, which the cache stores."""
    with torch.no_grad():
        return model(inputs["input_ids"][:, -1:], past_key_values=cache).logits[0, -1]


def read(model, cache, inputs) -> None:
    """Feeds the prompt in two halves, so that blocks with tiers of their own hold tokens, too."""
    half = inputs["input_ids"].shape[1] // 2
    for part in (slice(0, half), slice(half, None)):
        mask = inputs["attention_mask"][:, : half if part.stop else None]
        model(inputs["input_ids"][:, part], attention_mask=mask, past_key_values=cache)


def fields(store, tier: int, stream: str) -> dict[str, tuple[torch.Tensor, int]]:
    """The packed fields of a stream, or of a tier's stream, by their own names, and the tokens that a row of each holds; with
    offloading those of the copy on the device."""
    store = store.low if isinstance(store, OffloadStore) else store
    if isinstance(store, TieredStore):
        pool, prefix = store.tiers[tier].pool, f"{stream}."
    else:
        pool, prefix = store.streams[stream == "values"].pool, ""
    return {
        name.removeprefix(prefix): (tensor, pool.rows_of(pool.fields[name]))
        for name, tensor in pool.tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.full
@pytest.mark.parametrize("stream", ["keys", "values"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_overwritten_word_changes_the_output(model, case, stream):
    """A word of each tier in turn."""
    inputs = left_padded([PROMPT])
    slot = 2 if case.method in ("infllm", "streaming_llm") else 7  # among four sinks

    def answer(spoiled: int | None) -> tuple[torch.Tensor, int]:
        """The next logits with a word of this tier overwritten, and how many tiers there are."""
        with case.open(model) as cache, torch.no_grad():
            read(model, cache, inputs)
            if spoiled is not None:
                own = fields(cache.compressed[1].store, spoiled, stream)
                words, _ = next(own[name] for name in ("exact", "words", "coefficients") if name in own)
                # In every head, because heads have different tokens in a tier; in every slot, if oracle eviction attends to few.
                held = cache.sequences.tables[spoiled].rows[0]
                last = min(slot, words.shape[2] - 1)  # a block's page may be shorter
                page, slots = (torch.tensor(held), slice(None)) if case.method == "oracle" else (held[0], last)
                before = words[page, :, slots].clone()
                words[page, :, slots] = -before if before.is_floating_point() else ~before
            return next_logits(model, cache, inputs), getattr(cache.sequences, "stored", 1)

    expected, tiers = answer(None)
    assert tiers > 0
    for tier in range(tiers):
        assert not torch.equal(answer(tier)[0], expected), f"tier {tier}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_lies_beyond_the_rows_is_not_read(model, case):
    inputs, answers = left_padded([PROMPT, 210]), []
    for spoil in (False, True):
        with case.open(model) as cache, torch.no_grad():
            read(model, cache, inputs)
            spoiled = 0
            for layer in cache.compressed if spoil else ():
                for stream in ("keys", "values"):
                    for tier, table in enumerate(cache.sequences.tables[: getattr(cache.sequences, "stored", 1)]):
                        used = used_slots(layer.store, tier, stream)
                        if used % table.page_tokens == 0:
                            continue  # no page is partly filled
                        page, spoiled = table.rows[1][used // table.page_tokens], spoiled + 1
                        for name, (tensor, tokens) in fields(layer.store, tier, stream).items():
                            # Numbers of channels or atoms are those of an earlier token in that slot: never out of bounds.
                            rubbish = {"outliers.channels": 3, "indices": 0}.get(name, 99)
                            tensor[page, :, -(-(used % table.page_tokens) // tokens) :] = rubbish
            with torch.no_grad():
                mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
                step = model(inputs["input_ids"][:, -1:], attention_mask=mask, past_key_values=cache)
            answers.append(step.logits[:, -1])
    assert spoiled or not case.tiered or whole_pages_alone(case)
    assert torch.equal(*answers)


def whole_pages_alone(case) -> bool:
    """Whether a page is written as a whole, because its tokens share numbers."""
    return any(own.codec.token_group() == tier.page_tokens for tier in case.plan.tiers for _, own in tier.streams())


def used_slots(store, tier: int, stream: str) -> int:
    """How many slots of its pages hold tokens of the second row."""
    store = store.low if isinstance(store, OffloadStore) else store
    if isinstance(store, TieredStore):
        return store.counts(1)[tier]
    return store.streams[stream == "values"].plan.schedule.packed(210)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generation_never_decodes(model, case, monkeypatch):
    """Exceptions: MiKV decodes the one token of a head that leaves the important tier and is not exact there, to encode it again;
    corrections decode the block that is being encoded; and CSR, which sums atoms, and KVQuant and ZipCache's keys before RoPE,
    which are rotated to their positions, are decoded a tile at a time."""
    by_tile = case.method in ("csr", "kvquant") or (case.method == "zipcache" and case.options.get("rope") == "before")
    demotes_codes = case.method == "mikv" and case.options.get("important", 16) != 16
    demoted, encoding, most = [], [], TILE_TOKENS if by_tile else int(demotes_codes)

    def encode(codec, x, fp32_params, original=Corrected._encode):
        encoding.append(codec)
        block = original(codec, x, fp32_params)
        encoding.pop()
        return block

    def refuse(codec, block, channels, original=None):
        if encoding:
            return original(codec, block, channels)
        block_of = next(iter(block.values()))
        tokens = block_of.shape[0] * block_of.shape[-2]
        if case.method == "mikv":
            tokens = block_of.shape[-2]  # one for each row
        if tokens > most:
            raise AssertionError("a codec decoded tokens during generation")
        demoted.append(tokens)
        return original(codec, block, channels)

    monkeypatch.setattr(Corrected, "_encode", encode)
    for codec in codec_classes(Codec):
        if "decode" in vars(codec):
            monkeypatch.setattr(codec, "decode", partialmethod(refuse, original=codec.decode))
    with pytest.raises(AssertionError, match="decoded"):
        UniformQuant(2).decode({"words": torch.zeros(1, 8, TILE_TOKENS + 1, 2, dtype=torch.int16)}, 8)
    inputs = left_padded([PROMPT, 40])
    with case.open(model) as cache:
        sequences = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
        model.generate(
            input_ids=sequences,
            attention_mask=torch.ones_like(sequences) * _real(inputs, sequences),
            past_key_values=cache,
            max_new_tokens=2,
            num_beams=1,
            do_sample=True,
        )
    with case.open(model) as cache:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=4, num_beams=2, do_sample=False)
    assert bool(demoted) == (most > 0)


def codec_classes(base: type) -> set[type]:
    """All classes of codecs that subclass this one, also through others."""
    found = set(base.__subclasses__())
    return found.union(*map(codec_classes, found))


def _real(inputs, sequences):
    new = sequences.shape[1] - inputs["attention_mask"].shape[1]
    return torch.cat([inputs["attention_mask"], torch.ones(sequences.shape[0], new, dtype=torch.long)], 1)
