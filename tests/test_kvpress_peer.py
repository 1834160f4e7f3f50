"""Scoring of kvpress's methods on written cases (benchmarks/peers), with toy presses instead of kvpress."""

import json

import pytest
import torch
from toy_evaluation import answered
from toy_language_model import toy_model
from toy_presses import columns, kept, press, written
from transformers import DynamicCache

from benchmarks.peers import scoring
from benchmarks.peers.feed import Feed

SAME = 1e-5  # in nats, and relative: with other rows in a batch, float32 sums have another order


@pytest.fixture(scope="module")
def model():
    return toy_model()


def value_count(model, tokens):
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens


@pytest.mark.parametrize("kind", [0, 1], ids=["answers", "text"])
@pytest.mark.parametrize("name", ["none", "OtherPress"])
def test_what_nothing_is_removed_from_is_scored_as_by_the_project(model, kind, name):
    """Against `column.measure` with a DynamicCache. `OtherPress` (ratio 0, removes nothing) runs row by row."""
    column = columns(model)[kind]
    if kind == 0:  # answers to first questions are right except in one row of a batch, to second questions wrong
        batches = [answered(model, batch, 4, {(1, 2)}) for batch in column.batches()]
        column.batches = lambda: batches
    entry = scoring.measure(
        model, press(name, None if name == "none" else 0.0), json.loads(json.dumps(written(column)))
    )
    assert "error" not in entry and entry["title"] == column.title and entry["settings"] == column.settings
    assert len(entry["parts"]) == len(column.batches()) == 2 and entry["seconds"] > 0
    assert kind == 1 or any(batch.mask.min() == 0 for batch in column.batches()), "no row is padded"
    for number, batch in enumerate(column.batches()):
        found = column.read_part(batch, entry["parts"][number])
        expected = column.measure(DynamicCache(config=model.config), batch)
        if kind == 0:
            assert torch.equal(found[0], expected[0])
            assert found[0].view(-1, 2).T.tolist() == [
                [row != 1 for row in range(len(batch.mask))],
                [False] * len(batch.mask),
            ]
            found, expected = found[1], expected[1]
        torch.testing.assert_close(found, expected, rtol=SAME, atol=SAME)
        brought = int(batch.mask.sum()) + batch.answers[:, 1:].numel() if kind == 0 else batch[:, 1:].numel()
        assert entry["values"][number] == value_count(model, brought)
        assert entry["bytes"][number] == 4 * value_count(model, brought)  # no padding is held


def test_an_answer_is_exact_where_greedy_generation_gives_it(model):
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 259, (3, 20), generator=generator)
    mask = torch.ones_like(prompts)
    mask[0, :8] = 0
    answers = torch.zeros(3, 5, dtype=torch.int64)
    for row in range(3):
        tokens = prompts[row][mask[row] > 0][None]
        for position in range(5):
            answers[row, position] = (
                model(torch.cat((tokens, answers[row : row + 1, :position]), 1)).logits[0, -1].argmax()
            )
    answers[1, 3] = (answers[1, 3] + 1) % 259
    asked = torch.tensor([[1, 1, 0, 2, 2]] * 2 + [[1, 1, 0, 0, 0]])
    batch = {"prompts": prompts, "mask": mask, "answers": answers, "asked": asked}
    part, _, _ = scoring.answer(model, press(), {name: table.tolist() for name, table in batch.items()})
    assert part["exact"] == [[True, True], [True, False], [True, True]]
    assert len(part["log_probability"]) == 10


def test_what_follows_is_read_through_what_is_left_at_its_own_positions(model):
    """Against one forward over the whole text, masked so that tokens after the prefill do not see the removed keys."""
    text = torch.randint(3, 259, (2, 60), generator=torch.Generator().manual_seed(1))
    prefill, length = 40, 60
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[prefill:, :prefill] = False
    seen[prefill:, kept(prefill, 0.5)] = True
    with torch.no_grad():
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)
        logits = model(text, attention_mask=mask).logits
    likely = logits[:, prefill - 1 : -1].double().log_softmax(-1).gather(2, text[:, prefill:, None])
    part, size, values = scoring.score(model, press("KnormPress", 0.5), {"tokens": text.tolist()}, prefill, 7)
    torch.testing.assert_close(torch.tensor(part["nats"]).double(), -likely.sum((1, 2)), rtol=SAME, atol=SAME)
    assert values == value_count(model, 2 * 59) and size == 4 * value_count(model, 2 * (20 + 19))
    whole, _, _ = scoring.score(model, press(), {"tokens": text.tolist()}, prefill, 7)
    assert abs(whole["nats"][0] - part["nats"][0]) > 0.1, "nothing was removed"


def test_layers_of_different_length_are_read_token_by_token(model):
    text = {"tokens": torch.randint(3, 259, (2, 50), generator=torch.Generator().manual_seed(2)).tolist()}
    uneven = press("KnormPress", 0.5, slope=3)
    pieces, one = (scoring.score(model, uneven, text, 30, chunk) for chunk in (7, 1))
    assert pieces[0]["nats"] == pytest.approx(one[0]["nats"], rel=SAME) and pieces[1:] == one[1:]
    assert pieces[1] < 4 * pieces[2]


def test_heads_that_hide_keys_are_read_token_by_token(model):
    """kvpress replaces a hidden key by one that no query of the forward attends to; for a single query one always exists."""
    feed, tokens = Feed(model, press()), torch.full((1, 6), 5)
    layer = model.model.layers[0].self_attn
    layer.masked_key_indices = (torch.tensor([0]),) * 3
    try:
        feed.prefill(tokens)
        lengths, hook = [], lambda module, args, given: lengths.append(given["input_ids"].shape[1])
        handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        assert feed(tokens).shape[:2] == (1, 6)
        handle.remove()
    finally:
        del layer.masked_key_indices
    assert lengths == [1] * 6


@pytest.mark.parametrize(
    ("name", "expected"), [("none", 40), ("AdaKVPress:KnormPress", 40), ("KeyRerotationPress:KnormPress", 20)]
)
def test_keys_that_are_turned_are_followed_at_once(model, name, expected):
    feed = Feed(model, press(name, 0.5))
    positions = []
    hook = model.register_forward_pre_hook(
        lambda module, args, given: positions.append(given["position_ids"].tolist()), with_kwargs=True
    )
    feed.prefill(torch.full((2, 40), 7))
    feed(torch.full((2, 3), 8))
    hook.remove()
    assert positions == [[list(range(40))] * 2, [list(range(expected, expected + 3))] * 2]


def test_rows_of_one_length_are_run_together_where_a_press_allows_it():
    lengths = [5, 7, 7, 5, 9]
    for name in ("none", "KnormPress", "AdaKVPress:KnormPress"):
        assert scoring.together(lengths, press(name, 0.5)) == [[0, 3], [1, 2], [4]]
    for name in ("OtherPress", "AdaKVPress:OtherPress"):
        assert scoring.together(lengths, press(name, 0.5)) == [[0], [1], [2], [3], [4]]


def test_a_column_that_fails_is_told_in_one_line_and_the_others_count(model):
    answers, text = map(written, columns(model))
    failed = scoring.measure(model, press("BrokenPress", 0.5), answers)
    assert failed == {
        "title": answers["title"],
        "settings": answers["settings"],
        "error": "AssertionError: Input should contain more tokens",
    }
    assert scoring.words(failed) == f"failed: {failed['error']}"
    blind = toy_model()
    blind.lm_head.weight.data[3] = float("nan")
    assert "NaN" in scoring.measure(blind, press(), text)["error"]
    blind.lm_head.weight.data[3] = 0
    with torch.no_grad():
        blind.lm_head.register_forward_hook(
            lambda module, args, out: out.index_fill(-1, torch.tensor([65]), -torch.inf)
        )
    text["batches"][0]["tokens"][0][40] = 65
    assert "not finite" in scoring.measure(blind, press(), text)["error"]
