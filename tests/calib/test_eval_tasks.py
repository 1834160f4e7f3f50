"""The figures of retrieval and perplexity against plain forwards of the model and against greedy generation."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_evaluation import figures, subject
from toy_language_model import toy_model, toy_tokenizer
from transformers import PreTrainedTokenizerFast

from calib.documents.generators import RetrievalCase, retrieval_cases
from calib.errors import UsageError
from calib.evaluate.bootstrap import mean_interval
from calib.evaluate.feed import Feed
from calib.evaluate.tasks import build_task
from calib.evaluate.tasks.answer_tokens import AnswerBatch, batch, token_pair
from calib.runtime import compress


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.mark.parametrize("lines", [2, 7])
def test_log_probabilities_are_the_models_own(model, lines):
    (column,) = build_task("retrieval", {"lines": [lines], "cases": 6}).columns(subject(model))
    found = figures(column, model, "full")
    tokenizer, total, count = toy_tokenizer(), 0.0, 0
    for case in retrieval_cases(7, 6, lines):
        prompt, answer = (tokenizer(text)["input_ids"] for text in (case.prompt, case.answer))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        total += logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum().item()
        count += len(answer)
    assert found["log_probability"] == pytest.approx(total / count, abs=1e-4)
    assert column.length == pytest.approx(column.prompt + 3)


def test_an_answer_is_exact_just_when_greedy_generation_gives_it(model):
    (column,) = build_task("retrieval", {"lines": [4], "cases": 8}).columns(subject(model, batch_size=8))
    (cases,) = column.batches()
    with compress(model, "kivi", bits=2, residual=32) as cache:
        made = model.generate(
            input_ids=cases.prompts,
            attention_mask=cases.mask,
            past_key_values=cache,
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
        )[:, cases.prompts.shape[1] :]
    for wrong_at in (None, 0, 1, 3):
        answers = made.clone()
        if wrong_at is not None:
            answers[::2, wrong_at] = (answers[::2, wrong_at] + 1) % 259
        with compress(model, "kivi", bits=2, residual=32) as cache:
            exact, _ = column.measure(
                cache, AnswerBatch(cases.prompts, cases.mask, answers, torch.ones_like(answers, dtype=torch.bool))
            )
        assert exact.tolist() == [wrong_at is None or row % 2 == 1 for row in range(8)]
        asked = torch.tensor([position != 3 for position in range(4)]).expand(
            8, 4
        )  # the last token is fed and not asked
        with compress(model, "kivi", bits=2, residual=32) as cache:
            exact, likely = column.measure(cache, AnswerBatch(cases.prompts, cases.mask, answers, asked))
        assert exact.tolist() == [wrong_at in (None, 3) or row % 2 == 1 for row in range(8)] and len(likely) == 24


@pytest.mark.parametrize(("method", "options"), [("full", {}), ("rtn", {"bits": 4}), ("kivi", {"residual": 32})])
def test_ragged_rows_score_together_what_they_score_alone(model, method, options):
    scores = []
    for size in (1, 5):
        (column,) = build_task("retrieval", {"lines": [6], "cases": 5}).columns(subject(model, batch_size=size))
        scores.append(figures(column, model, method, **options))
    together = column.batches()[0]
    assert together.mask.sum(1).unique().numel() > 1  # really ragged
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_shorter_answers_are_scored_on_their_own_tokens():
    made = batch([([5, 6, 7], [8, 9]), ([5], [3])], pad=0, device=torch.device("cpu"))
    assert made.prompts.tolist() == [[5, 6, 7], [0, 0, 5]] and made.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert made.answers.tolist() == [[8, 9], [3, 3]] and made.asked.tolist() == [[True, True], [True, False]]


def test_a_tokenizer_that_joins_the_space_to_the_number():
    symbols = ["a", ":", " ", "1", "2", " 1"]
    tokenizer = Tokenizer(models.BPE({symbol: n for n, symbol in enumerate(symbols)}, merges=[(" ", "1")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("~", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_pair(fast, RetrievalCase("a: ", "12")) == ([0, 1], [5, 4])
    assert token_pair(fast, RetrievalCase("a: ", "21")) == ([0, 1, 2], [4, 3])


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_perplexity_through_the_full_cache_is_that_of_one_forward(model, chunk):
    task = build_task("perplexity", {"prefill": 16, "chunk": chunk, "length": 40, "tokens": 72})
    (column,) = task.columns(subject(model, batch_size=2))
    found = figures(column, model, "full")
    with torch.no_grad():
        logits = model(column.text.tokens).logits[:, 15:-1].double()
    nats = -logits.log_softmax(-1).gather(2, column.text.tokens[:, 16:, None]).mean().item()
    assert found["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    assert found["sequences"] == 3 and found["tokens"] == 72
    assert found["low"] <= found["perplexity"] <= found["high"]


def test_perplexity_sees_the_compression(model):
    (column,) = build_task("perplexity", {"prefill": 16, "chunk": 8, "length": 64, "tokens": 96}).columns(
        subject(model)
    )
    full, two = (figures(column, model, *method)["perplexity"] for method in (["full"], ["rtn"]))
    assert full != pytest.approx(two, rel=1e-4)
    assert full == figures(column, model, "full")["perplexity"]


def test_positions_count_real_tokens(model):
    with compress(model, "full") as cache:
        seen = []
        hook = model.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
        )
        feed = Feed(model, cache)
        feed(torch.tensor([[0, 5, 6], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]]))
        feed(torch.tensor([[7], [7]]))
        hook.remove()
    assert seen == [[[0, 0, 1], [0, 1, 2]], [[2], [3]]]


@pytest.mark.full
def test_the_limit_and_the_longest_context(model):
    (column,) = build_task("retrieval", {"lines": [2], "cases": 9}).columns(subject(model, limit=3))
    assert column.rows == 3 and column.settings["cases"] == 3
    with pytest.raises(UsageError, match=r"retrieval from 40 lines takes .* made for 256; ask for fewer lines"):
        build_task("retrieval", {"lines": [2, 40]}).columns(subject(model))
    with pytest.raises(UsageError, match="perplexity takes 512 tokens and this model was made for 256"):
        build_task("perplexity", {}).columns(subject(model))


def test_the_bootstrap_interval():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=900)
    low, high = mean_interval(values, seed=1)
    assert (low, high) == mean_interval(values, seed=1) != mean_interval(values, seed=2)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 30, rel=0.1)
    assert low < values.mean() < high
    assert mean_interval(values[:1], seed=1) == (values[0], values[0])


@pytest.mark.parametrize("name", ["perplexity", "agreement"])
@pytest.mark.parametrize(("tokens", "sequences"), [(84, 3), (85, 4), (1, 1)])
def test_tokens_that_count_are_rounded_up_to_whole_sequences(model, name, tokens, sequences):
    task = build_task(name, {"prefill": 20, "length": 48, "tokens": tokens})
    (column,) = task.columns(subject(model))
    assert column.rows == column.settings["sequences"] == sequences
