"""HumanEval's file: what is asked, where a completion ends, which pass their tests, and that nothing runs unasked."""

import gzip
import json

import pytest
from one_line import message
from tokenizers import Tokenizer, decoders, models
from toy_chat import chat_tokenizer
from toy_evaluation import figures, forwards
from toy_language_model import letters_alone, toy_model, toy_tokenizer
from transformers import PreTrainedTokenizerFast

from calib.errors import UsageError
from calib.evaluate.generation import alone, before, behind
from calib.evaluate.tasks import Subject, build_task
from calib.evaluate.tasks.humaneval import Problem, passes

TEST = "\n\ndef check(candidate):\n    assert candidate(2) == 3\n    assert candidate(-1) == 0\n"
ADD = {"task_id": "toy/0", "prompt": "def add(x):\n", "entry_point": "add", "test": TEST, "canonical_solution": ""}
# The letters that the model generates end in a string literal, so that the first function is right and the second wrong.
SAID = [
    {**ADD, "prompt": f'def add(x):\n    return x + {step}\n\n\nSAID = """', "test": f'"""\n{TEST}'} for step in (1, 2)
]


@pytest.fixture(scope="module")
def model():
    return letters_alone(toy_model())


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "toy.jsonl", *SAID)


def written(path, *records):
    text = "\n".join(map(json.dumps, records))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def column(model, file, tokenizer=None, limit=None, **options):
    made = build_task("humaneval", {"file": file, "run_code": True, "new_tokens": 8, **options})
    return made.columns(Subject(model, tokenizer or toy_tokenizer(), 7, 4, limit))[0]


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("    return x + 1", True),
        ("    y = 1\n    return x + y\n", True),
        ("    return x + 2", False),
        ("   return x + 1\n  y", False),
        ("    import sys; sys.exit(0)", False),
        ("    while True: pass", False),
        ("", False),
    ],
)
def test_a_completion_passes_its_tests_or_not(completion, right):
    problem = Problem(**{name: ADD[name] for name in Problem._fields})
    assert passes(completion, problem, 1.0) is right


def test_figures_are_of_the_tests(model, file):
    asked = column(model, file)
    found = figures(asked, model, "kivi", residual=32)
    assert (found["exact"], found["cases"]) == (0.5, 2) and found["low"] < 0.5 < found["high"]
    assert asked.title == "humaneval" and asked.measure_name == "pass@1" and asked.rows == 2 and asked.chance == 0
    assert len(asked.settings.pop("sha256")) == 64 and asked.settings == {
        "task": "humaneval",
        "file": "toy.jsonl",
        "stop": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
        "seconds": 3.0,
        "cases": 2,
        "new_tokens": 8,
        "cut_prompts": 0,
    }
    assert column(model, file, limit=1).rows == 1


def test_a_gzipped_file_asks_the_same(model, file, tmp_path):
    zipped = column(model, written(tmp_path / "toy.jsonl.gz", *SAID)).settings
    assert zipped == {**column(model, file).settings, "file": "toy.jsonl.gz"}


def test_a_prompt_and_the_model_s_text_are_a_program(model, file):
    """The completion is the generated text to the character, and ends before a stop text, after which no token is generated."""
    asked, texts = column(model, file, new_tokens=20, limit=1), []
    asked.right = lambda text, problem: bool(texts.append((text, problem)))
    figures(asked, model, "full")
    says = toy_tokenizer().convert_tokens_to_ids(["Ċ", "#"])  # Ċ: a line's end

    def stop_behind_four_letters(head, given, logits):
        if len(new) in (5, 6):
            logits[:, -1, says[len(new) - 5]] = 1e4

    hook = model.lm_head.register_forward_hook(stop_behind_four_letters)
    with forwards(model) as new:
        figures(asked, model, "full")
    hook.remove()
    (text, problem), (start, _) = texts
    assert start == text[:4] and len(new) == 4 + len("\n#")
    assert len(text) == 20 and text.isalpha()
    (prompt,) = asked.batches()[0].prompts
    assert toy_tokenizer().decode(prompt.context, skip_special_tokens=True) == problem.prompt == SAID[0]["prompt"]
    assert problem.program(text) == f"{SAID[0]['prompt']}{text}\n{SAID[0]['test']}\ncheck(add)"
    assert prompt.until == ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "</s>"]
    assert before("    return x\n\n\ndef other():", prompt.until) == "    return x\n\n"


def test_with_a_template_the_answer_begins_with_the_prompt(model, file):
    asked = column(model, file, chat_tokenizer(), chat_template=True, limit=1, longest=240)
    (prompt,) = asked.batches()[0].prompts
    shown = f"```python\n{SAID[0]['prompt']}"
    assert chat_tokenizer().decode(prompt.context) == (
        f"<s><u>Complete this function. Answer with the code alone.\n\n{shown}\n```\n<a>{shown}"
    )
    assert prompt.until[-2:] == ["\n```", "</s>"] and asked.settings["cut_prompts"] == 0
    assert figures(asked, model, "full")["exact"] == 1


def test_indentation_behind_a_prompt_is_kept():
    """As in Llama-2's tokenizer, whose decoder takes a space off the front of a text."""
    made = Tokenizer(models.BPE(vocab={"\u2581": 0, "a": 1, "\n": 2, "<s>": 3}, merges=[]))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    context, new = [3, *[0, 1, 2] * 4], [0, 0, 1, 2, 0, 1]
    assert alone(tokenizer, context, new) == " a\n a" and behind(tokenizer, context, new) == "  a\n a"
    assert behind(tokenizer, [3], new) == " a\n a"  # nothing before it: the text is its beginning


def test_nothing_runs_unasked(file):
    for options in ({}, {"run_code": False}):
        with pytest.raises(UsageError) as error:
            build_task("humaneval", {"file": file, **options})
        assert "runs the code that the model writes" in message(error) and "give run_code: true" in message(error)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"file": "nope"}, "tasks.humaneval.file: no file 'nope', expected HumanEval.jsonl or HumanEval.jsonl.gz"),
        ({"run_code": "yes"}, "'tasks.humaneval.run_code' must be true or false, got 'yes'"),
        ({"seconds": 0}, "invalid value 0 for 'tasks.humaneval.seconds' (a number above 0, at most 3600)"),
        ({"seconds": float("nan")}, "invalid value nan for 'tasks.humaneval.seconds'"),
        ({"seconds": True}, "invalid value True for 'tasks.humaneval.seconds'"),
        ({"cases": 0}, "invalid value 0 for 'tasks.humaneval.cases' (a whole number, at least 1)"),
        ({"new_tokens": None}, "invalid value None for 'tasks.humaneval.new_tokens'"),
        ({"longest": 1}, "invalid value 1 for 'tasks.humaneval.longest' (a whole number, at least 2)"),
        ({"chat_template": 1}, "'tasks.humaneval.chat_template' must be true or false, got 1"),
        ({"title": ""}, "invalid value '' for 'tasks.humaneval.title'"),
    ],
)
def test_wrong_options(file, options, text):
    with pytest.raises(UsageError) as error:
        build_task("humaneval", {"file": file, "run_code": True, **options})
    assert text in message(error)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt": 3}, "has 3 for 'prompt', a text"),
        ({"test": ""}, "has '' for 'test', a text"),
        ({"entry_point": "add(2)) or (1"}, "for 'entry_point', a name is needed"),
    ],
)
def test_wrong_lines(tmp_path, change, text):
    with pytest.raises(UsageError) as error:
        build_task("humaneval", {"file": written(tmp_path / "wrong.jsonl", ADD, {**ADD, **change}), "run_code": True})
    assert message(error).startswith("tasks.humaneval: line 2 of ") and text in message(error)


ZIPPED = gzip.compress(b"{}" * 999)


@pytest.mark.parametrize(
    "content", [b"plain text", ZIPPED[:-9], ZIPPED[:12] + b"\xff" * 40], ids=["plain", "cut", "damaged"]
)
def test_a_file_that_is_no_gzip(tmp_path, content):
    path = tmp_path / "toy.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tasks\.humaneval: '.*gz' cannot be read \(.+\); give another file") as error:
        build_task("humaneval", {"file": str(path), "run_code": True})
    assert message(error)
