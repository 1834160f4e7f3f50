"""Generation through SpeCache's speculative cache: the tokens are those of decoding one by one, in every mode of `generate`.

If every token can be fetched (k = 1000) nothing is lost, and tokens are those of the full cache; if none can (k = 0) they are those
of the low-bit copy alone. Both hold for every generation loop, because only the model's forward differs.
"""

import pytest
import torch
from contract.architectures import BY_NAME
from contract.modes import Heard
from tolerances import LOGITS
from toy_models import NEW, draft_of, generate, left_padded, random_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from calib.runtime import compress

LOW = {"bits": 2, "residual": 32}
EVERYTHING = {"method": "specache", "k": 1000, **LOW}
LATE = EVERYTHING | {"speculative": False}
FULL = {"method": "full"}
RAGGED = [150, 31, 200]


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def both(model, run, wanted=EVERYTHING, plain=FULL):
    """What `run` returns for a cache with the options `wanted`, and for one with the options `plain`."""
    found = []
    for options in (wanted, plain):
        with compress(model, **options) as cache:
            found.append(run(cache))
    return found


SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 0}
MODES = {
    "greedy": {},
    "chunked prefill": {"prefill_chunk_size": 60},
    "sampling": SAMPLING,
    "top k and p": {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "several samples": SAMPLING | {"num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "beam sampling": SAMPLING | {"num_beams": 3},
    "repetition penalty": {"repetition_penalty": 1.5},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "least length": {"min_new_tokens": NEW, "eos_token_id": list(range(2, 60))},
}


@pytest.mark.full
@pytest.mark.parametrize("wanted", [EVERYTHING, LATE], ids=["ahead", "late"])
@pytest.mark.parametrize("mode", MODES)
def test_with_room_for_all_every_mode_gives_the_tokens_of_the_full_cache(model, mode, wanted):
    def run(cache):
        torch.manual_seed(7)
        return generate(model, left_padded(RAGGED), cache, max_new_tokens=40, **MODES[mode]).sequences

    assert torch.equal(*both(model, run, wanted))


@pytest.mark.full
@pytest.mark.parametrize("speculative", [True, False], ids=["ahead", "late"])
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_without_room_it_is_the_low_bit_copy_alone(model, mode, speculative):
    def run(cache):
        torch.manual_seed(7)
        return generate(model, left_padded(RAGGED), cache, max_new_tokens=40, **MODES[mode])

    wanted = {"method": "specache", "k": 0, "speculative": speculative, **LOW}
    found, low = both(model, run, wanted, {"method": "kivi", **LOW})
    full = both(model, run)[1]
    assert torch.equal(found.sequences, low.sequences) and not torch.equal(low.sequences, full.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(low.logits))


@pytest.mark.full
@pytest.mark.parametrize("family", ["mistral-sliding", "qwen3-mixed", "gemma2", "gemma3"])
def test_layers_that_slide(family):
    """All layers slide, or some: sliding layers that are not compressed must drop the speculative token, too."""
    model = BY_NAME["gemma3"].model() if family == "gemma3" else random_model(family)
    for options in ({}, {"num_beams": 3}):

        def run(cache, options=options):
            return generate(model, left_padded(RAGGED), cache, max_new_tokens=60, **options)

        found, full = both(model, run)
        assert torch.equal(found.sequences, full.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(full.logits), atol=LOGITS, rtol=0)


@pytest.mark.full
def test_rows_that_end_early(model):
    """End tokens are some of the generated ones, in turn: rows end in different steps, and continue as padding."""

    def run(cache, **options):
        return generate(model, left_padded(RAGGED), cache, max_new_tokens=40, **options).sequences

    shown = both(model, run)[1][:, -40:]
    for end in shown[:, 10:30:7].flatten().tolist():
        found, full = both(model, lambda cache, end=end: run(cache, eos_token_id=end, pad_token_id=0))
        assert torch.equal(found, full)
        assert (full[:, -1] == 0).any() or full.shape[1] < max(RAGGED) + 40


@pytest.mark.full
@pytest.mark.parametrize("wanted", [EVERYTHING, LATE], ids=["ahead", "late"])
def test_several_turns_on_one_cache(model, wanted):
    """Turns of one token and of many; the later ones ragged, so that padding lies inside the rows."""

    def run(cache):
        inputs = left_padded([150, 60])
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        for turn, lengths in enumerate(([1, 1], [9, 40], [2, 1], [70, 33])):
            tokens = generate(model, {"input_ids": tokens, "attention_mask": mask}, cache, max_new_tokens=7).sequences
            said = left_padded(lengths, seed=turn)
            tokens = torch.cat([tokens, said["input_ids"]], 1)
            mask = torch.cat([mask, mask.new_ones(2, 7), said["attention_mask"]], 1)
        return generate(model, {"input_ids": tokens, "attention_mask": mask}, cache, max_new_tokens=20).sequences

    assert torch.equal(*both(model, run, wanted))


@pytest.mark.full
@pytest.mark.parametrize("way", ["prompt lookup", "assisted"])
def test_drafts_through_a_speculative_cache(model, way):
    """No speculative token is added while drafts are verified."""
    options = {"prompt lookup": {"prompt_lookup_num_tokens": 4}, "assisted": {"assistant_model": draft_of(model, 4)}}[
        way
    ]

    def run(cache):
        text = left_padded([40])["input_ids"].repeat(1, 4)
        found = model.generate(text, past_key_values=cache, max_new_tokens=40, do_sample=False, **options)
        assert cache.sequences.lengths == [found.shape[1] - 1] and not cache.sequences.speculating
        return model.generate(found, past_key_values=cache, max_new_tokens=20, do_sample=False)

    assert torch.equal(*both(model, run))


@pytest.mark.full
def test_streamers_hear_every_token_in_order(model):
    heard = Heard()
    with compress(model, **EVERYTHING) as cache:
        tokens = generate(model, left_padded([150]), cache, streamer=heard).sequences
    assert heard.ended and len(heard.parts) == NEW + 1
    assert torch.equal(torch.cat(heard.parts), tokens[0])


class Enough(StoppingCriteria):
    """Stops at `count` columns; `shown` lists the number of columns of each call."""

    def __init__(self, count: int) -> None:
        self.count, self.shown = count, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.count)


@pytest.mark.full
def test_stopping_criteria_and_processors_see_true_tokens_alone(model):
    def run(cache):
        enough = Enough(max(RAGGED) + 9)
        found = generate(
            model,
            left_padded(RAGGED),
            cache,
            stopping_criteria=StoppingCriteriaList([enough]),
            logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)]),
        )
        assert enough.shown == list(range(max(RAGGED) + 1, max(RAGGED) + 10))
        assert cache.sequences.lengths == [length + 8 for length in RAGGED]
        return found.sequences

    assert torch.equal(*both(model, run))


@pytest.mark.full
def test_outputs_have_a_column_a_step(model):
    def run(cache):
        asked = {"output_scores": True, "output_hidden_states": True}
        return generate(model, left_padded(RAGGED), cache, **asked)

    found, full = both(model, run)
    assert len(found.scores) == len(found.logits) == len(found.hidden_states) == NEW
    for mine, other in zip(found.hidden_states[1:], full.hidden_states[1:], strict=True):
        assert [part.shape for part in mine] == [(3, 1, 64)] * 3
        torch.testing.assert_close(torch.stack(mine), torch.stack(other), atol=LOGITS, rtol=0)
    for mine, other in ((found.logits, full.logits), (found.scores, full.scores)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(other), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_guess_has_the_type_of_its_token(rows):
    """GPT-2 adds an embedding of `token_type_ids` to each token's: a speculative token has its row's type, also with two rows."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 101, "n_positions": 256, "initializer_range": 0.15}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0)).eval()
    inputs = left_padded([90] * rows)
    types = torch.arange(2, 2 + rows)[:, None].expand(-1, 90)
    found, full = both(model, lambda cache: generate(model, inputs, cache, token_type_ids=types))
    assert torch.equal(found.sequences, full.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(full.logits), atol=LOGITS, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, SAMPLING, SAMPLING | {"num_return_sequences": 2}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("k", [8, 1000])
def test_custom_generate_is_the_same_loop(model, options, k):
    answers = []
    for custom in (False, True):
        torch.manual_seed(7)
        with compress(model, **EVERYTHING | {"k": k}) as cache:
            asked = {"custom_generate": cache.custom_generate} if custom else {}
            answers.append(generate(model, left_padded(RAGGED), cache, **asked, **options))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    assert torch.equal(torch.stack(answers[0].logits), torch.stack(answers[1].logits))
