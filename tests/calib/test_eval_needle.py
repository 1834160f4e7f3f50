"""The task `needle`: the depths of needles, the figures of its grid, and a model that finds needles."""

from pathlib import Path

import pytest
import torch
from one_line import message
from toy_chat import chat_tokenizer
from toy_evaluation import figures, subject
from toy_language_model import save_text, toy_model, toy_tokenizer

from calib.capture.language_model import load
from calib.documents.splits import split_of
from calib.errors import UsageError
from calib.evaluate.tasks import Subject, build_task
from calib.evaluate.tasks.needle import holds_all

DEPTHS = [0, 0.25, 0.5, 0.75, 1]


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(save_text(tmp_path_factory.mktemp("text") / "words.txt"))


def columns(model, text, limit=None, seed=7, **options):
    given = {"lengths": [250], "cases": 3, "depths": DEPTHS, "text": text, **options}
    return build_task("needle", given).columns(subject(model, batch_size=50, limit=limit, seed=seed))


def rows(column):
    """(text of the prompt, answer) of each row."""
    tokenizer = toy_tokenizer()
    return [
        (tokenizer.decode(prompt, skip_special_tokens=True), tokenizer.decode(answer))
        for made in column.batches()
        for prompt, answer in zip(made.prompts, made.answers, strict=True)
    ]


def depth_of(prompt):
    """Return the depth of the needle: the share of the other text that lies before it."""
    before, _, after = prompt.rpartition("\n?\n")[0].partition(" The number of ")
    return len(before) / (len(before) + len(after.partition(".")[2]))


def test_a_needle_and_its_question(model, text):
    (column,) = columns(model, text)
    words = set(Path(text).read_text(encoding="utf-8").split())
    for prompt, answer in rows(column):
        hay, question = prompt.split("\n?\n")
        key = question.removeprefix(" The number of ").removesuffix(" is ")
        assert hay.count(f" The number of {key} is {answer}.") == 1 and prompt.count(answer) == 1
        assert len(answer) == 4 and split_of(key, answer) == "eval"
        rest = hay.replace(f" The number of {key} is {answer}.", "")
        assert set(rest.split()) <= words
        assert 250 - 60 < len(prompt) + len(answer) <= 250  # bytes are tokens, a line is 40 to 60 of them
    assert column.rows == 15 and column.title == "needle 250"
    assert column.prompt == sum(len(prompt) for prompt, _ in rows(column)) / 15
    assert column.length == column.prompt + 3


def test_needles_lie_at_their_depths(model, text):
    for wanted in (0.0, 0.5, 1.0):
        (column,) = columns(model, text, depths=wanted)
        found = [depth_of(prompt) for prompt, _ in rows(column)]
        assert all(abs(depth - wanted) <= (0.3 if wanted == 0.5 else 0) for depth in found), found
    (column,) = columns(model, text, depths=[0, 1], cases=1)
    assert sorted(depth_of(prompt) for prompt, _ in rows(column)) == [0, 1]


def test_the_grids_figures_are_of_their_depths(model, text):
    (column,) = columns(model, text)
    deep = torch.tensor([depth_of(prompt) == 1 for prompt, _ in rows(column)])
    middle = torch.tensor([0 < depth_of(prompt) < 1 for prompt, _ in rows(column)])
    assert deep.sum() == 3 and middle.sum() == 9
    found = column.summary([(deep | middle, torch.zeros(60))])
    assert [found[f"exact at depth {depth:g}"] for depth in DEPTHS] == [0, 1, 1, 1, 1]
    assert found["exact"] == 0.8 and found["cases"] == 15 and 0.5 < found["low"] < 0.8 < found["high"] < 1
    found = column.summary([(deep, torch.zeros(60))])
    assert [found[f"exact at depth {depth:g}"] for depth in DEPTHS] == [0, 0, 0, 0, 1]


def test_a_column_a_length_and_the_same_seed_the_same_rows(model, text):
    short, long = columns(model, text, lengths=[150, 250])
    assert (short.title, long.title) == ("needle 150", "needle 250") and short.length < 150 < long.length
    assert rows(long) == rows(columns(model, text)[0]) != rows(columns(model, text, seed=8)[0])
    assert long.settings == columns(model, text)[0].settings
    assert {**short.settings, "length": 250} == long.settings
    assert long.settings["text"] == "words.txt" and len(long.settings["sha256"]) == 64
    first = figures(long, model, "rtn", bits=2)
    assert first == figures(long, model, "rtn", bits=2) and first != figures(long, model, "full")


def test_a_limit_cuts_cases_off(model, text):
    whole, (limited,), (three,) = columns(model, text)[0], columns(model, text, limit=7), columns(model, text, limit=3)
    assert limited.rows == 7 and set(rows(limited)) < set(rows(whole))
    found = three.summary([(torch.ones(3, dtype=torch.bool), torch.zeros(12))])
    assert [name for name in found if "depth" in name] == [f"exact at depth {depth}" for depth in ("0", "0.25", "0.5")]


def in_words(model, text, **options):
    """A column of a needle in words, and (prompt, expected texts) of its rows."""
    (column,) = columns(model, text, **{"lengths": [256], "needle": "san_francisco", "new_tokens": 8, **options})
    decode = toy_tokenizer().decode
    read = [
        (decode(row.context, skip_special_tokens=True), answer)
        for made in column.batches()
        for row, answer in zip(made.prompts, made.answers, strict=True)
    ]
    return column, read


SANDWICH = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
OWN = {"sentence": "It is blue.", "question": "What is it?", "expected": "blue"}


def test_the_sentence_of_the_papers(model, text):
    column, rows = in_words(model, text)
    words = set(Path(text).read_text(encoding="utf-8").split())
    for prompt, expected in rows:
        hay, _, question = prompt.partition("\n\nWhat is")
        assert question == " the best thing to do in San Francisco?\nAnswer:" and hay.count(SANDWICH) == 1
        assert set(hay.replace(SANDWICH, "").split()) <= words
        assert all(part in SANDWICH for part in expected) and 256 - 60 - 8 < len(prompt) <= 256 - 8
    assert column.title == "needle 256" and column.rows == 15 and column.settings["cut_prompts"] == 0
    assert column.settings["sentence"] == SANDWICH and "digits" not in column.settings
    hashes = [in_words(model, text, **options)[0].settings["sha256"] for options in ({}, {}, {"seed": 8})]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_sentence_of_ones_own_at_its_depth(model, text):
    for depth in (0, 1):
        for hay in (
            prompt.partition("\n\n")[0].strip() for prompt, _ in in_words(model, text, needle=OWN, depths=depth)[1]
        ):
            assert hay.startswith("It is blue. ") if depth == 0 else hay.endswith("\n It is blue.")


def test_an_answer_holds_the_expected_texts(model, text):
    assert holds_all("You sit in DOLORES park, with a sandwich.", ["sandwich", "Dolores Park"])
    assert not holds_all("You sit in a park with a sandwich.", ["sandwich", "Dolores Park"])
    column, said = in_words(model, text)[0], []
    column.right = lambda answer, expected: bool(said.append(answer)) or holds_all(answer, expected)
    assert figures(column, model, "kivi", residual=32)["exact"] == 0 and len(said) == 15
    column, _ = in_words(model, text, needle={**OWN, "expected": [said[0][1:3].swapcase()]}, depths=[0, 1])
    column.right = lambda answer, expected: expected == [said[0][1:3].swapcase()]
    found = figures(column, model, "full")
    assert (found["exact"], found["exact at depth 0"], found["exact at depth 1"]) == (1, 1, 1)


def test_a_templates_words_count_for_sentences(model, text):
    made = build_task("needle", {"lengths": 230, "needle": OWN, "new_tokens": 8, "text": text, "chat_template": True})
    (asked,) = made.columns(Subject(model, chat_tokenizer(), 7, 4, 4))
    for row in asked.batches()[0].prompts:
        assert chat_tokenizer().decode(row.context).endswith("\n\nWhat is it?\n<a>") and len(row.context) <= 222


@pytest.mark.full
def test_sampled_text_and_a_model_that_finds_needles():
    """The embedded model finds every one; a window of the newest tokens loses those that lie before it."""
    model, tokenizer = load("artifacts/tiny-llama", "float32")
    (column,) = build_task("needle", {"lengths": 256, "depths": [0, 1], "cases": 4}).columns(
        Subject(model, tokenizer, 20, 8, None)
    )
    assert column.settings["text"] == "sampled from the model" and 180 < column.length <= 255
    assert figures(column, model, "full")["exact"] == 1
    window = figures(column, model, "streaming_llm", sinks=4, window=96)
    assert (window["exact at depth 0"], window["exact at depth 1"]) == (0, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lengths": []}, "invalid value [] for 'tasks.needle.lengths' (a list of whole numbers)"),
        ({"lengths": "512"}, "invalid value '512' for 'tasks.needle.lengths' (a list of whole numbers)"),
        ({"lengths": [0]}, "invalid value 0 for 'tasks.needle.lengths' (a whole number, at least 1)"),
        ({"lengths": [64.5]}, "invalid value 64.5 for 'tasks.needle.lengths'"),
        ({"depths": []}, "invalid value [] for 'tasks.needle.depths' (a list of numbers from 0 to 1)"),
        ({"depths": [0, 1.5]}, "invalid value 1.5 for 'tasks.needle.depths' (numbers from 0 to 1)"),
        ({"depths": [float("nan")]}, "invalid value nan for 'tasks.needle.depths'"),
        ({"depths": [True]}, "invalid value True for 'tasks.needle.depths'"),
        ({"depths": [0, 0.5, 0.0]}, "'tasks.needle.depths' holds 0.0 twice; name each depth once"),
        ({"cases": 0}, "invalid value 0 for 'tasks.needle.cases' (a whole number, at least 1)"),
        ({"digits": 0}, "invalid value 0 for 'tasks.needle.digits' (a whole number, at least 1)"),
        ({"title": ""}, "invalid value '' for 'tasks.needle.title'"),
        ({"text": "nope.txt"}, "tasks.needle.text: no file 'nope.txt'; null samples text from the model instead"),
        ({"text": {"nam": "x"}}, "did you mean 'tasks.needle.text.name'?"),
        ({"natural_spacing": 1}, "'tasks.needle.natural_spacing' must be true or false, got 1"),
        ({"depth": 1}, "did you mean 'tasks.needle.depths'?"),
        (
            {"needle": "paris"},
            "'paris' for 'tasks.needle.needle' (one of numbers, san_francisco, or {sentence:, question:, expected:})",
        ),
        ({"needle": ["numbers"]}, "invalid value ['numbers'] for 'tasks.needle.needle'"),
        ({"needle": {**OWN, "expect": "blue"}}, "did you mean 'tasks.needle.needle.expected'?"),
        ({"needle": {"sentence": "It is blue."}}, "invalid value None for 'tasks.needle.needle.question' (a text)"),
        ({"needle": {**OWN, "sentence": " "}}, "invalid value ' ' for 'tasks.needle.needle.sentence' (a text)"),
        ({"needle": {**OWN, "expected": []}}, "invalid value [] for 'tasks.needle.needle.expected' (a list of texts"),
        ({"needle": {**OWN, "expected": ["blue", 3]}}, "invalid value ['blue', 3] for 'tasks.needle.needle.expected'"),
        ({"new_tokens": 0}, "invalid value 0 for 'tasks.needle.new_tokens' (a whole number, at least 1)"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError) as error:
        build_task("needle", options)
    assert text in message(error)


def test_lengths_that_cannot_be(model, text):
    with pytest.raises(
        UsageError, match="needle takes 257 tokens and this model was made for 256; give a smaller length"
    ):
        columns(model, text, lengths=[200, 257])
    with pytest.raises(UsageError, match=r"length=80 leaves no room for text; give a length of (\d+) or more") as error:
        columns(model, text, lengths=[80])
    enough = int(message(error).split(" of ")[1].split()[0])
    assert columns(model, text, lengths=[enough])[0].length < enough


def test_text_that_is_no_text(model, tmp_path):
    endless = tmp_path / "endless.txt"
    endless.write_text("no sentence " * 20)
    with pytest.raises(UsageError, match=r"tasks\.needle: the text has no sentence .* give another text=FILE") as error:
        columns(model, str(endless))
    assert message(error)
    tokenizer = toy_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(
        UsageError, match=r"tasks\.needle: this tokenizer has no first token to sample after; give text=FILE"
    ):
        build_task("needle", {"lengths": [250]}).columns(Subject(model, tokenizer, 7, 4, None))
