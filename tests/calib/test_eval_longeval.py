"""LongEval's files: how answers are read, what identifies a column, what is cut, and what is refused."""

import json

import pytest
import torch
from one_line import message
from toy_chat import chat_tokenizer
from toy_evaluation import figures
from toy_language_model import toy_model, toy_tokenizer

from calib.capture.language_model import load
from calib.documents.generators import retrieval_cases
from calib.errors import RunError, UsageError
from calib.evaluate.tasks import Subject, build_task
from calib.evaluate.tasks.longeval import first_number, last_number, names_it

WORDS = ["kalo mine", "rutaso", "pe kamiru", "nelo", "tasope", "rulomi kape"]


@pytest.fixture(scope="module")
def model():
    return toy_model()


def lines_file(folder, cases=5, name="few_lines.jsonl"):
    """Lines of words and numbers, longer from case to case."""
    path = folder / name
    with path.open("w", encoding="utf-8") as file:
        for case in range(cases):
            lines = [f"line {word}: <{1000 * case + at}>" for at, word in enumerate(WORDS[: 2 + case])]
            prompt = "\n".join([*lines, f"Which number has line {WORDS[0]}?"])
            record = {"prompt": prompt, "expected_number": 1000 * case, "num_lines": len(lines), "random_idx": ["x", 1]}
            file.write(json.dumps(record) + "\n\n")
    return str(path)


def topics_file(folder, topics, prompt="USER: one. USER: two. Which was the first?"):
    path = folder / "two_topics.jsonl"
    records = [{"prompt": prompt, "topics": [topic, "another"]} for topic in topics]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(path)


def column(model, file, tokenizer=None, limit=None, batch_size=4, **options):
    made = build_task("longeval", {"file": file, "new_tokens": 8, **options})
    (found,) = made.columns(Subject(model, tokenizer or toy_tokenizer(), 7, batch_size, limit))
    return found


def said(model, text, new=8):
    """Return the model's greedy continuation of `text` with transformers' own cache."""
    tokenizer = toy_tokenizer()
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("text", "last", "first"),
    [
        ("The number is 4821.", True, True),
        ("<4821>\nline 7", False, True),
        ("In line 12 it is 04821", True, False),
        ("48210", False, False),
        ("none", False, False),
        ("", False, False),
    ],
)
def test_numbers_in_an_answer(text, last, first):
    assert (last_number(text, "4821"), first_number(text, "4821")) == (last, first)


def test_zero_is_a_number():
    assert last_number("it is 0", "0") and last_number("000", "0") and not last_number("", "0")


def test_a_topics_name_in_whatever_case():
    assert names_it("the first was THE SEA and its tides", "The sea") and not names_it("the se a", "The sea")


def test_what_is_generated_is_what_the_model_says(model, tmp_path):
    prompt = "USER: one. USER: two. Which was the first?"
    text = said(model, prompt)
    topics = [text[1:4].upper(), "nothing like it", text[-3:]]
    asked = column(model, topics_file(tmp_path, topics, prompt), cases=None)
    with_topics = [names_it(text, topic) for topic in topics]
    assert with_topics == [True, False, True]
    found = figures(asked, model, "full")
    assert found["exact"] == pytest.approx(2 / 3) and found["cases"] == 3 and 0 < found["low"] < 2 / 3 < found["high"]
    assert asked.words(found).startswith("0.667 [0.2") and asked.brief(found) == "0.667"
    assert asked.chance == 0.5 and asked.settings["kind"] == "topics" and "number" not in asked.settings


def test_ragged_rows_generate_together_what_they_generate_alone(model, tmp_path, monkeypatch):
    texts = []
    for size in (1, 5):
        asked = column(model, lines_file(tmp_path), batch_size=size)
        monkeypatch.setattr(asked, "right", lambda text, answer: bool(texts.append((answer, text))))
        figures(asked, model, "full")
    assert len({len(prompt.context) for prompt in asked.batches()[0].prompts}) == 5  # really ragged
    assert texts[:5] == texts[5:] and len({text for _, text in texts}) > 1


def test_what_a_column_says_of_itself(model, tmp_path):
    file = lines_file(tmp_path)
    asked = column(model, file, limit=4)
    assert asked.title == "few_lines" and column(model, file, title="lines").title == "lines"
    hashed = asked.settings.pop("sha256")
    assert len(hashed) == 64 and asked.settings == {
        "task": "longeval",
        "file": "few_lines.jsonl",
        "kind": "lines",
        "number": "last",
        "cases": 4,
        "new_tokens": 8,
        "cut_prompts": 0,
    }
    assert asked.rows == 4 and asked.length == asked.prompt + 7 and not asked.reads_pages
    assert asked.chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4)
    assert column(model, file, cases=3).settings["sha256"] != hashed
    assert column(model, file, cases=None).rows == 5 == column(model, file, cases=80).rows


def test_new_tokens_are_longevals(model, tmp_path):
    large = model.config.max_position_embeddings
    assert column(model, lines_file(tmp_path), new_tokens=None).settings["new_tokens"] == 100
    assert column(model, topics_file(tmp_path, ["a"]), new_tokens=None).settings["new_tokens"] == 50
    with pytest.raises(UsageError, match=f"was made for {large} tokens, prompt included; give less than {large}"):
        column(model, lines_file(tmp_path), new_tokens=large)


def test_the_prompt_is_the_users_turn(model, tmp_path):
    tokenizer, file = chat_tokenizer(), lines_file(tmp_path)
    plain, asked = column(model, file), column(model, file, tokenizer, chat_template=True)
    for one, two in zip(plain.batches()[0].prompts, asked.batches()[0].prompts, strict=True):
        assert tokenizer.decode(two.context) == f"<s><u>{tokenizer.decode(one.context)}\n<a>"
    assert asked.settings == {**plain.settings, "chat_template": asked.settings["chat_template"]}
    with pytest.raises(
        UsageError, match=r"tasks\.longeval\.chat_template is true and this model's tokenizer has no chat"
    ):
        column(model, file, chat_template=True)


def test_logits_that_are_no_numbers_are_no_answer(tmp_path):
    broken = toy_model()
    broken.lm_head.weight.data[5] = float("nan")
    with pytest.raises(RunError, match="logits are NaN"):
        figures(column(broken, lines_file(tmp_path)), broken, "full")


def test_the_models_own_settings_of_sampling_do_not_count(tmp_path):
    """A penalty on what the prompt holds would keep a model from repeating the number it is asked for."""
    texts, model = [], toy_model()
    for penalty in (None, 50.0):
        model.generation_config.repetition_penalty, model.generation_config.do_sample = penalty, penalty is not None
        asked = column(model, lines_file(tmp_path))
        asked.right = lambda text, answer: bool(texts.append(text))
        figures(asked, model, "full")
    assert texts[:5] == texts[5:]


@pytest.mark.parametrize("longest", [40, 41, None])
def test_long_prompts_lose_their_middle(model, tmp_path, longest):
    long = "a" * 100 + "b" * 200 + "c" * 100
    path = tmp_path / "long.jsonl"
    records = [{"prompt": prompt, "expected_number": 1} for prompt in ("short", long, "x" * 248)]
    path.write_text("\n".join(map(json.dumps, records)))
    asked = column(model, str(path), chat_tokenizer(), longest=longest, chat_template=longest == 41)
    short, other, cut = (chat_tokenizer().decode(prompt.context) for prompt in asked.batches()[0].prompts)
    if longest == 40:
        assert (short, asked.settings["cut_prompts"], asked.settings["longest"]) == ("short", 2, 40)
        assert {other, cut} == {"a" * 20 + "c" * 20, "x" * 40}
    elif longest == 41:
        assert {other, cut} == {"<s><u>" + "a" * 16 + "c" * 17 + "\n<a>", "<s><u>" + "x" * 33 + "\n<a>"}
    else:  # 256 tokens less 8 new ones
        assert asked.settings["cut_prompts"] == 1 and "longest" not in asked.settings
        assert {len(other), len(cut)} == {248} and "a" * 100 + "b" * 48 + "c" * 100 in (other, cut)
    figures(asked, model, "full")


@pytest.mark.full
def test_a_model_that_finds_the_line(tmp_path):
    """The share of exact answers, which are generated here, equals that of the retrieval task, which scores the true answers."""
    model, tokenizer = load("artifacts/tiny-llama", "float32")
    path = tmp_path / "own.jsonl"
    cases = retrieval_cases(20, 6, 12)
    records = [{"prompt": case.prompt, "expected_number": int(case.answer)} for case in cases]
    path.write_text("\n".join(map(json.dumps, records)))
    scored = build_task("retrieval", {"lines": [12], "cases": 6})
    subject = Subject(model, tokenizer, 20, 6, None)
    (asked,) = build_task("longeval", {"file": str(path), "new_tokens": 4}).columns(subject)
    (same,) = scored.columns(subject)
    assert figures(asked, model, "full")["exact"] == figures(same, model, "full")["exact"] == 1
    window = {"sinks": 4, "window": 24}
    lost = figures(asked, model, "streaming_llm", **window)["exact"]
    assert lost == figures(same, model, "streaming_llm", **window)["exact"] < 1


GOOD = json.dumps({"prompt": "p", "expected_number": 3})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "has no line, expected LongEval's lines (prompt, expected_number) or topics"),
        ("\n \n", "has no line"),
        (f"{GOOD}\n{{", "is no JSON (Expecting property name"),
        (f"{GOOD}\n[1]", "is [1] and no object"),
        (f'{GOOD}\n{{"prompt": "p"}}', "has no 'expected_number'"),
        (f'{GOOD}\n{{"expected_number": 3}}', "has no 'prompt'"),
        (
            f'{GOOD}\n{{"prompt": "", "expected_number": 3}}',
            "has '' for 'prompt', a text with something in it is needed",
        ),
        (f'{GOOD}\n{{"prompt": "p", "expected_number": "3"}}', "has '3' for 'expected_number', a whole number"),
        (f'{GOOD}\n{{"prompt": "p", "expected_number": -3}}', "has -3 for 'expected_number', at least 0 is needed"),
        ('{"x": 1}', "has neither 'expected_number' nor 'topics'"),
        ('{"prompt": "p", "topics": []}', "has [] for 'topics', a list with something in it is needed"),
        ('{"prompt": "p", "topics": ["a", 1]}', "has ['a', 1] for 'topics', a list of texts is needed"),
    ],
)
def test_wrong_lines(tmp_path, content, text):
    path = tmp_path / "wrong.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        build_task("longeval", {"file": str(path)})
    line = f"line {len(content.splitlines())} of" if "no line" not in text else "wrong.jsonl"
    assert text in message(error) and line in message(error) and message(error).startswith("tasks.longeval: ")


def test_only_the_lines_that_are_asked_are_read(tmp_path):
    path = tmp_path / "half.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\nnothing of ours")
    build_task("longeval", {"file": str(path), "cases": 2})
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe")
    with pytest.raises(UsageError, match=r"line 2 of .* is no JSON"):
        build_task("longeval", {"file": str(path)})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "invalid value '' for 'tasks.longeval.file' (a path, of LongEval's lines"),
        ({"file": 3}, "invalid value 3 for 'tasks.longeval.file'"),
        ({"file": "nope.jsonl"}, "tasks.longeval.file: no file 'nope.jsonl', expected LongEval's lines"),
        ({"file": "tests"}, "tasks.longeval.file: no file 'tests'"),
        ({"cases": 0}, "invalid value 0 for 'tasks.longeval.cases' (a whole number, at least 1)"),
        ({"new_tokens": 0}, "invalid value 0 for 'tasks.longeval.new_tokens'"),
        ({"longest": 1}, "invalid value 1 for 'tasks.longeval.longest' (a whole number, at least 2)"),
        ({"number": "any"}, "invalid value 'any' for 'tasks.longeval.number' (one of last, first)"),
        ({"chat_template": 1}, "'tasks.longeval.chat_template' must be true or false, got 1"),
        ({"path": "x"}, "unknown"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError) as error:
        build_task("longeval", options)
    assert text in message(error)
