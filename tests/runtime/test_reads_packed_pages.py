"""Attention really reads the packed words: spoiling one changes the answer, and decoding a cache is never needed."""

import pytest
import torch
from cases import CASES
from toy_models import left_padded, random_model

from calib.runtime.stages.codec import Exact, UniformQuant

PROMPT = 300  # whole pages even behind a window of 128 tokens


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def next_logits(model, cache, inputs):
    """The logits of one more token, without keeping the token: the cache is left as it was."""
    with torch.no_grad():
        return model(inputs["input_ids"][:, -1:], past_key_values=cache).logits[0, -1]


@pytest.mark.parametrize("stream", ["keys", "values"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_overwritten_word_changes_the_output(model, case, stream):
    inputs, answers = left_padded([PROMPT]), []
    for spoil in (False, True):
        with case.open(model) as cache, torch.no_grad():
            model(**inputs, past_key_values=cache)
            pool = cache.compressed[1].store.streams[stream == "values"].pool
            words = pool.tensors["exact" if case.name == "full" else "words"]
            page = cache.rows.table.rows[0][0]
            before = words[page, 1, 17, 1].clone()
            if spoil:
                words[page, 1, 17, 1] = -before if case.name == "full" else ~before
            answers.append(next_logits(model, cache, inputs))
    assert not torch.equal(*answers)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_lies_beyond_the_rows_is_not_read(model, case):
    inputs, answers = left_padded([PROMPT, 200]), []
    for spoil in (False, True):
        with case.open(model) as cache, torch.no_grad():
            model(**inputs, past_key_values=cache)
            if spoil:
                for layer in cache.compressed:
                    for stream in layer.store.streams:
                        packed = stream.plan.schedule.packed(200)
                        if packed % 128 == 0:
                            continue  # no page is partly filled
                        page = cache.rows.table.rows[1][packed // 128]
                        for name, tensor in stream.pool.tensors.items():
                            rows = stream.pool.fields[name].tokens_per_row
                            tensor[page, :, -(-(packed % 128) // rows) :] = 99
            with torch.no_grad():
                mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
                step = model(inputs["input_ids"][:, -1:], attention_mask=mask, past_key_values=cache)
            answers.append(step.logits[:, -1])
    assert torch.equal(*answers)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generation_never_decodes(model, case, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a codec decoded tokens during generation")

    monkeypatch.setattr(UniformQuant, "decode", refuse)
    monkeypatch.setattr(Exact, "decode", refuse)
    with pytest.raises(AssertionError, match="decoded"):
        UniformQuant(2).decode({}, 8)
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


def _real(inputs, sequences):
    new = sequences.shape[1] - inputs["attention_mask"].shape[1]
    return torch.cat([inputs["attention_mask"], torch.ones(sequences.shape[0], new, dtype=torch.long)], 1)
