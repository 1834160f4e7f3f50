"""Pass keys: the paper's prompt, where the key lies, what a row's length counts, and which answers are right."""

import pytest
import torch
from one_line import message
from toy_chat import chat_tokenizer
from toy_evaluation import figures, subject
from toy_language_model import toy_model, toy_tokenizer

from calib.errors import UsageError
from calib.evaluate.tasks import Subject, build_task

DEPTHS = [0, 0.25, 0.5, 0.75, 1]
# The paper's words, and its filler as its code makes it.
DESCRIPTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
GARBAGE = " ".join(["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."] * 20)


@pytest.fixture(scope="module")
def model():
    """A toy model for 1024 tokens instead of 256, which the prompt alone exceeds."""
    made = toy_model()
    made.config.max_position_embeddings = 1024
    return made


def column(model, limit=None, seed=7, **options):
    given = {"lengths": [700], "cases": 2, "depths": DEPTHS, "new_tokens": 8, **options}
    (found,) = build_task("passkey", given).columns(subject(model, batch_size=10, limit=limit, seed=seed))
    return found


def rows(column, tokenizer=None):
    """(prompt, pass key) of each row."""
    decode = (tokenizer or toy_tokenizer()).decode
    return [
        (decode(row.context, skip_special_tokens=tokenizer is None), answer)
        for made in column.batches()
        for row, answer in zip(made.prompts, made.answers, strict=True)
    ]


def test_the_prompt_is_the_paper_s(model):
    read, depths = rows(column(model)), []
    for prompt, key in read:
        description, before, needle, after, question = prompt.split("\n")
        assert (description, question) == (DESCRIPTION, "What is the pass key? The pass key is")
        assert needle == f"The pass key is {key}. Remember it. {key} is the pass key." and 1 <= int(key) <= 50_000
        for filler in (before, after):
            assert GARBAGE.startswith(filler) and (not filler or filler.endswith("."))
        assert 700 - 8 - 60 < len(prompt) <= 700 - 8  # bytes are tokens
        depths.append(before.count(".") / (before.count(".") + after.count(".")))
    for depth in DEPTHS:
        assert sum(abs(found - depth) < 0.04 for found in depths) == 2
    assert len({key for _, key in read}) == 10


def test_the_first_number_is_the_answer(model):
    asked = column(model)
    assert asked.right("12. The pass key is 7", "12") and not asked.right("It is 7, not 12", "12")
    assert not asked.right("123", "12") and not asked.right("none", "12")


def test_figures_and_settings(model):
    asked = column(model)
    last = [key for prompt, key in rows(asked) if not prompt.split("\n")[3]]
    asked.right = lambda text, key: key in last
    found = figures(asked, model, "kivi", residual=32)
    assert [found[f"exact at depth {depth:g}"] for depth in DEPTHS] == [0, 0, 0, 0, 1]
    assert found["exact"] == 0.2 and found["cases"] == 10 and found["low"] < 0.2 < found["high"]
    assert asked.title == "passkey 700" and asked.rows == 10 and asked.chance == 0
    assert len(asked.settings.pop("sha256")) == 64 and asked.settings == {
        "task": "passkey",
        "length": 700,
        "depths": DEPTHS,
        "cases": 10,
        "new_tokens": 8,
        "cut_prompts": 0,
    }


def test_the_same_seed_the_same_rows_and_a_limit_cuts_them_off(model):
    assert rows(column(model)) == rows(column(model)) != rows(column(model, seed=8))
    limited = column(model, limit=3)
    assert limited.rows == 3 and set(rows(limited)) < set(rows(column(model)))
    found = limited.summary([torch.ones(3, dtype=torch.bool)])
    assert [name for name in found if "depth" in name] == [f"exact at depth {depth}" for depth in ("0", "0.25", "0.5")]


def test_a_template_s_words_count(model):
    made = build_task("passkey", {"lengths": 500, "new_tokens": 8, "chat_template": True})
    (asked,) = made.columns(Subject(model, chat_tokenizer(), 7, 4, 4))
    for prompt, _ in rows(asked, chat_tokenizer()):
        assert prompt.startswith(f"<s><u>{DESCRIPTION}\n") and prompt.endswith("The pass key is\n<a>")
    assert 500 - 60 < asked.length < 500 and len(asked.settings["chat_template"]) == 16
    with pytest.raises(UsageError, match=r"tasks\.passkey\.chat_template is true and this model's tokenizer has no"):
        column(model, chat_template=True)


def test_no_row_exceeds_its_length(model):
    """The filler begins anew after the key, and its sentences may then take more tokens than those that were counted."""
    for length in range(400, 430):
        assert max(len(prompt) for prompt, _ in rows(column(model, lengths=[length], limit=5))) <= length - 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lengths": []}, "invalid value [] for 'tasks.passkey.lengths' (a list of whole numbers)"),
        ({"depths": [2]}, "invalid value 2 for 'tasks.passkey.depths' (numbers from 0 to 1)"),
        ({"cases": 0}, "invalid value 0 for 'tasks.passkey.cases' (a whole number, at least 1)"),
        ({"new_tokens": 0}, "invalid value 0 for 'tasks.passkey.new_tokens' (a whole number, at least 1)"),
        ({"title": "a|b"}, "invalid value 'a|b' for 'tasks.passkey.title'"),
        ({"chat_template": 1}, "'tasks.passkey.chat_template' must be true or false, got 1"),
        ({"length": 3}, "did you mean 'tasks.passkey.lengths'?"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError) as error:
        build_task("passkey", options)
    assert text in message(error)


def test_lengths_that_cannot_be(model):
    with pytest.raises(UsageError, match="passkey takes 1025 tokens and this model was made for 1024; give a smaller"):
        column(model, lengths=[700, 1025])
    with pytest.raises(
        UsageError, match=r"length=270 leaves no room for text; give a length of (\d+) or more"
    ) as error:
        column(model, lengths=[270], limit=1)
    enough = int(message(error).split(" of ")[1].split()[0])
    assert column(model, lengths=[enough], limit=1).length < enough
