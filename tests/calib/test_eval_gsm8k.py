"""GSM8K's file: how a prompt is put together, where an answer ends, which number counts, and what is refused."""

import json

import pytest
from one_line import message
from toy_chat import chat_tokenizer
from toy_evaluation import figures, forwards
from toy_language_model import letters_alone, toy_model, toy_tokenizer

from calib.errors import UsageError
from calib.evaluate.generation import before
from calib.evaluate.tasks import Subject, build_task
from calib.evaluate.tasks.gsm8k import last_number_is

QUESTIONS = [("Two birds and 3 more?", "2 + 3 = <<2+3=5>>5\n#### 5"), ("A dear house?", "Dear.\n#### 1,250,000")]
EXAMPLES = "Question: One and one?\nOne and one is 2.\nThe answer is 2.\n"


@pytest.fixture(scope="module")
def model():
    return letters_alone(toy_model())


@pytest.fixture
def files(tmp_path):
    """The options `file` and `prompt_file`."""
    test, prompt = tmp_path / "test.jsonl", tmp_path / "examples.txt"
    test.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in QUESTIONS), encoding="utf-8")
    prompt.write_text(EXAMPLES, encoding="utf-8")
    return {"file": str(test), "prompt_file": str(prompt)}


def column(model, files, tokenizer=None, limit=None, **options):
    made = build_task("gsm8k", {**files, "new_tokens": 8, **options})
    return made.columns(Subject(model, tokenizer or toy_tokenizer(), 7, 4, limit))[0]


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("3 + 2 = 5.\nThe answer is 5.", "5", True),
        ("The answer is $1,250,000.00", "1250000", True),
        ("so 5 birds of 7", "5", False),
        ("10-3", "3", True),
        ("it is -3", "-3", True),
        ("it is -3", "3", False),
        ("the 3,4", "4", True),
        ("1.50", "1.5", True),
        ("five", "5", False),
        ("", "0", False),
        ("9" * 5000, "9", False),
    ],
)
def test_the_last_number_counts(text, expected, right):
    assert last_number_is(text, expected) is right


def test_a_prompt_is_the_examples_an_empty_line_and_the_question(model, files):
    tokenizer = toy_tokenizer()
    (made,) = column(model, files).batches()
    prompts = {tokenizer.decode(row.context) for row in made.prompts}
    assert prompts == {f"{EXAMPLES}\nQuestion: {question}\n" for question, _ in QUESTIONS}
    assert sorted(made.answers) == ["1,250,000", "5"]
    assert made.prompts[0].until == ["\nQuestion:", "\nQ:", "</s>"] and made.prompts[0].new == 8
    (made,) = column(model, {**files, "prompt_file": None}, form="Q: {question}\nA:", stop="\nQ:").batches()
    assert {tokenizer.decode(row.context) for row in made.prompts} == {f"Q: {q}\nA:" for q, _ in QUESTIONS}
    assert made.prompts[0].until == ["\nQ:", "</s>"]
    (made,) = column(model, files, chat_tokenizer(), chat_template=True).batches()
    shown = {tokenizer.decode(row.context) for row in made.prompts}
    assert shown == {f"<s><u>{prompt.strip()}\n<a>" for prompt in prompts}


def test_generation_ends_at_the_next_question(model, files):
    """With a stop text that the model generates by itself, the answer ends before that text, and no token is generated after it."""
    asked, texts = column(model, files, new_tokens=30, limit=1), []
    asked.right = lambda text, answer: bool(texts.append(text))
    with forwards(model) as new:
        figures(asked, model, "full")
    assert len(new) == len(texts[0]) == 30  # a token is a letter
    stop = texts[0][5:7]
    stopped = column(model, files, new_tokens=30, limit=1, stop=[stop])
    stopped.right = asked.right
    with forwards(model) as new:
        figures(stopped, model, "full")
    assert texts[1] == before(texts[0], [stop]) and len(new) == len(texts[1] + stop) <= 7


def test_figures_and_settings(model, files):
    asked = column(model, files)
    found = figures(asked, model, "kivi", residual=32)
    assert found["exact"] == 0 and found["cases"] == 2 and found["low"] == 0 < found["high"] < 1
    assert len(asked.settings.pop("sha256")) == 64 and asked.settings == {
        "task": "gsm8k",
        "file": "test.jsonl",
        "prompt_file": "examples.txt",
        "stop": ["\nQuestion:", "\nQ:"],
        "cases": 2,
        "new_tokens": 8,
        "cut_prompts": 0,
    }
    assert asked.title == "gsm8k" and asked.chance == 0 and asked.rows == 2
    hashes = [column(model, files, **options).settings["sha256"] for options in ({}, {"form": "{question}"})]
    hashes += [column(model, {**files, "prompt_file": None}).settings["sha256"]]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"file": "nope"}, "tasks.gsm8k.file: no file 'nope', expected GSM8K's test.jsonl"),
        ({"prompt_file": "nope"}, "tasks.gsm8k.prompt_file: no file 'nope', expected a text with worked examples"),
        ({"prompt_file": ""}, "invalid value '' for 'tasks.gsm8k.prompt_file' (a path, of a text with"),
        ({"form": "Q:"}, "invalid value 'Q:' for 'tasks.gsm8k.form' (a text with {question} in it)"),
        ({"stop": [""]}, "invalid value [''] for 'tasks.gsm8k.stop' (a list of texts)"),
        ({"stop": 3}, "invalid value 3 for 'tasks.gsm8k.stop'"),
        ({"cases": 0}, "invalid value 0 for 'tasks.gsm8k.cases' (a whole number, at least 1)"),
        ({"new_tokens": None}, "invalid value None for 'tasks.gsm8k.new_tokens'"),
        ({"longest": True}, "invalid value True for 'tasks.gsm8k.longest'"),
        ({"chat_template": None}, "'tasks.gsm8k.chat_template' must be true or false, got None"),
        ({"title": None}, "invalid value None for 'tasks.gsm8k.title'"),
    ],
)
def test_wrong_options(files, options, text):
    with pytest.raises(UsageError) as error:
        build_task("gsm8k", {**files, **options})
    assert text in message(error)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"question": "q"}, "has no 'answer'"),
        ({"question": 3, "answer": "#### 3"}, "has 3 for 'question', a text"),
        ({"question": "q", "answer": "3"}, "has no number behind #### in its answer"),
        ({"question": "q", "answer": "3 #### none"}, "has no number behind #### in its answer"),
    ],
)
def test_wrong_lines(tmp_path, record, text):
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "#### 3"}) + "\n" + json.dumps(record))
    with pytest.raises(UsageError) as error:
        build_task("gsm8k", {"file": str(path)})
    assert message(error).startswith("tasks.gsm8k: line 2 of ") and text in message(error)


def test_examples_that_are_no_text(files, tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(
        UsageError, match=r"bytes\.txt' cannot be read .* expected a text with worked examples in UTF-8"
    ):
        build_task("gsm8k", {**files, "prompt_file": str(tmp_path / "bytes.txt")})
