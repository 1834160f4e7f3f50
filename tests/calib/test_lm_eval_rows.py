"""Rows of lm-eval's requests, the batches they make, and its metrics as figures; needs no lm-eval."""

import pytest
import torch
from one_line import message
from toy_language_model import toy_tokenizer
from transformers import BloomConfig, GPT2Config, LlamaConfig

from calib.errors import RunError, UsageError
from calib.evaluate.figures import less_is_better, scalars
from calib.evaluate.generation import EndTexts, Prompt, before
from calib.evaluate.lm_eval.metrics import figures
from calib.evaluate.lm_eval.rows import Scored, in_batches, length_of, prompt, scored


def row(context, continuation):
    return Scored([5] * context, [6] * continuation)


def test_every_row_is_in_one_batch_of_its_kind():
    rows = [row(9, 3), row(1, 30), Prompt([5] * 4, 8, ["\n"], {}), row(7, 20), row(1, 2), row(40, 3), row(8, 3)]
    rows += [Prompt([5] * 4, 8, ["\n"], {"do_sample": True}), Prompt([5] * 9, 8, ["\n"], {}), row(30, 2)]
    for size in (1, 3, 100):
        batches = in_batches(rows, size, 16, 64)
        assert sorted(position for batch in batches for position in batch.positions) == list(range(len(rows)))
        for batch in batches:
            assert len(batch.rows) <= size and [rows[position] for position in batch.positions] == list(batch.rows)
            assert (
                len({(type(row), len(row.context) == 1, str(row[2:]) * isinstance(row, Prompt)) for row in batch.rows})
                == 1
            )
    together = {frozenset(batch.positions) for batch in in_batches(rows, 100, 16, 64)}
    assert together == {frozenset(positions) for positions in ({2, 8}, {7}, {1, 4}, {0, 5, 6, 9, 3})}


def test_no_batch_feeds_a_row_beyond_the_models_length():
    rows = [row(60, 2), row(58, 7), row(20, 40), row(3, 60), row(64, 1), row(10, 5), row(57, 8), row(1, 64)]
    batches = in_batches(rows, 100, 16, 64)
    assert all(max(batch.lengths()) <= 64 for batch in batches) and len(batches) == 7
    assert {tuple(batch.positions) for batch in batches} >= {(2,), (3,), (0, 5), (7,)}


def test_what_batches_say_of_their_rows():
    (batch,) = in_batches([row(9, 3), row(5, 30)], 4, 16, 64)
    assert sorted(batch.prefill(16)) == [4, 8] and sorted(batch.lengths()) == [34, 38]
    (batch,) = in_batches([row(1, 3), row(1, 30)], 4, 16, 64)
    assert batch.prefill(16) == [16, 16] and batch.prefill(64) == [30, 30] and batch.lengths() == [30, 30]
    (batch,) = in_batches([Prompt([5] * 4, 8, [], {})], 4, 16, 64)
    assert batch.prefill(16) == [4] and batch.lengths() == [11]


def test_contexts_lose_their_beginning():
    assert scored([1, 2, 3], [4, 5], 4) == Scored([1, 2, 3], [4, 5])  # the last token is not fed
    assert scored([1, 2, 3], [4, 5], 3) == Scored([2, 3], [4, 5])
    assert scored([1, 2, 3], [4, 5], 2) == Scored([3], [4, 5])
    assert prompt([1, 2, 3, 4], {}, [], 2, 5).context == [2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "new", "until", "options"),
    [
        ({}, 7, ["</s>"], {"do_sample": False}),
        ({"until": "\n", "max_gen_toks": 3}, 3, ["\n", "</s>"], {"do_sample": False}),
        ({"until": ["a", "", "</s>"], "max_new_tokens": 4}, 4, ["a", "</s>"], {"do_sample": False}),
        ({"temperature": 0.0, "max_length": 9}, 7, ["</s>"], {"do_sample": False}),
        ({"temperature": 0.5, "top_p": 0.9}, 7, ["</s>"], {"do_sample": True, "temperature": 0.5, "top_p": 0.9}),
        ({"temperature": 0.5, "do_sample": False}, 7, ["</s>"], {"do_sample": False}),
    ],
)
def test_settings_of_a_generation(settings, new, until, options):
    given = dict(settings)
    assert prompt([1], settings, ["</s>"], 7, 64) == Prompt([1], new, until, options)
    assert settings == given  # lm-eval's own dictionary is left as it was


def test_settings_that_cannot_be():
    for new in (64, 0):
        with pytest.raises(UsageError, match=f"max_gen_toks={new} leaves no room") as error:
            prompt([1], {"max_gen_toks": new}, [], 7, 64)
        assert message(error)
    with pytest.raises(UsageError, match=r"until must be texts, got \[3\]"):
        prompt([1], {"until": [3]}, [], 7, 64)


def test_stop_texts():
    assert (
        before("one two three", ["three", "two"]) == "one " and before("one", ["x"]) == "one" and before("x", []) == "x"
    )
    tokenizer = toy_tokenizer()
    ends = EndTexts(tokenizer, ["née", "</s>"], prompt=2)
    ids = torch.tensor(
        [tokenizer.encode("née xxnée"), tokenizer.encode("née xxxxxx"), [*tokenizer.encode("né xxxxxx"), 2]]
    )
    assert [ends(ids[:, :end], None).tolist() for end in (2, 4, 10)] == [[False] * 3, [False] * 3, [False] * 3]
    assert ends(ids, None).tolist() == [True, False, True] and ends.ended == {0, 2}


def test_the_models_length():
    tokenizer = toy_tokenizer()
    assert length_of(LlamaConfig(max_position_embeddings=256), tokenizer) == 256
    assert length_of(BloomConfig(), tokenizer) == 2048  # the config has no length
    tokenizer.model_max_length = 99
    assert length_of(BloomConfig(), tokenizer) == 99 and length_of(GPT2Config(n_positions=300), tokenizer) == 300


def test_metrics_as_figures():
    found = {"alias": "toy", "name": "toy", "sample_len": 40, "acc_norm,none": 0.7, "acc_norm_stderr,none": 0.1}
    found |= {"acc,none": 0.95, "acc_stderr,none": 0.05, "bits_per_byte,none": 1.5, "bits_per_byte_stderr,none": "N/A"}
    made = figures(found)
    assert (made["accuracy"], made["accuracy_norm"], made["bits_per_byte"], made["cases"]) == (0.95, 0.7, 1.5, 40)
    assert (made["low"], made["high"]) == (pytest.approx(0.95 - 1.959964 * 0.05), 1.0)
    assert made["accuracy_norm_high"] - made["accuracy_norm_low"] == pytest.approx(2 * 1.959964 * 0.1)
    assert scalars([made]) == ["accuracy", "accuracy_norm", "bits_per_byte"] and len(made) == 8
    directions = [
        less_is_better(name) for name in ("accuracy_norm", "bits_per_byte", "word_perplexity", "f1", "exact_match")
    ]
    assert directions == [False, True, True, False, False]
    filters = {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5, "sample_len": 4}
    assert figures(filters) == {"exact_match": 0.25, "exact_match flexible-extract": 0.5, "cases": 4}
    with pytest.raises(RunError, match="lm-eval's word_perplexity is inf"):
        figures({"word_perplexity,none": float("inf")})
    with pytest.raises(RunError, match="no metric"):
        figures({"alias": "toy", "acc_stderr,none": 0.1})
