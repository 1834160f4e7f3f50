"""Chat templates: what is prefilled, what is asked after the generation prompt, and what is refused."""

import pytest
import torch
from one_line import message
from toy_chat import CHAT, chat_tokenizer
from toy_evaluation import figures
from toy_language_model import save_text, toy_model, toy_tokenizer

from calib.documents.generators import Piece
from calib.errors import UsageError
from calib.evaluate.tasks import Subject, build_task
from calib.evaluate.tasks.answer_tokens import token_row
from calib.evaluate.tasks.chat import Chat

SPACED = CHAT.replace("{{ message['content'] | trim }}", "{{ ' ' + message['content'] }}")  # as Llama 2 writes answers
THINKING = CHAT.replace("'<a>' }}", "'<a>' + ('<think></think>' if loop.last else '') }}", 1)  # as Qwen 3 does


@pytest.fixture(scope="module")
def model():
    return toy_model()


def column(model, task="retrieval", template=CHAT, **options):
    given = {"lines": [3], "cases": 4} if task == "retrieval" else {}
    made = build_task(task, {**given, "chat_template": True, **options})
    return made.columns(Subject(model, chat_tokenizer(template), 7, 4, None))[0]


def read(column):
    """Yield (prefilled text, text after it, `asked` of its tokens) of each row, special tokens included."""
    tokenizer = chat_tokenizer()
    (made,) = column.batches()
    rows = zip(*(part.tolist() for part in made), strict=True)
    for prompt, mask, answers, asked in rows:
        real = [token for token, seen in zip(prompt, mask, strict=True) if seen]
        last = max(at for at, number in enumerate(asked) if number) + 1
        yield tokenizer.decode(real), tokenizer.decode(answers[:last]), asked[:last]


def test_the_prompt_is_the_users_turn_with_the_generation_prompt(model):
    plain = build_task("retrieval", {"lines": [3], "cases": 4}).columns(Subject(model, toy_tokenizer(), 7, 4, None))[0]
    questions = {(prompt.strip(), answer) for prompt, answer, _ in read(plain)}
    for prompt, answer, asked in read(column(model)):
        head, _, opened = prompt.rpartition("\n")
        assert opened == "<a>" and head.startswith("<s><u>") and prompt.count("<s>") == 1
        assert (head.removeprefix("<s><u>"), answer) in questions and asked == [1, 1, 1, 1]


def test_the_answer_is_scored_behind_the_generation_prompt(model):
    asked, total = column(model, cases=3), 0.0
    found, tokenizer = figures(asked, model, "full"), chat_tokenizer()
    for prompt, answer, _ in read(asked):
        turn = [{"role": "user", "content": prompt.removeprefix("<s><u>").removesuffix("\n<a>")}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        right = tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids + right])).logits[0, len(ids) - 1 : -1].double()
        total += float(logits.log_softmax(-1).gather(1, torch.tensor(right)[:, None]).sum())
    assert found["log_probability"] == pytest.approx(total / 12, abs=1e-4)


def test_several_questions_are_several_turns(model):
    for prompt, rest, asked in read(column(model, queries=2)):
        lines = dict(line.split(": ") for line in prompt.removeprefix("<s><u>").split("\n")[:3])
        first, second = rest.split("</s><u>")
        question, answer = second.split("\n<a>")
        assert first in lines.values() and lines[question.strip().rstrip(":")] == answer
        assert asked == [1] * 4 + [0] * (len(asked) - 8) + [2] * 4


def test_the_template_is_part_of_what_identifies_a_cell(model):
    plain = build_task("retrieval", {"lines": [3], "cases": 4}).columns(Subject(model, toy_tokenizer(), 7, 4, None))[0]
    one, two = column(model), column(model, template=THINKING)
    assert "chat_template" not in plain.settings and len(one.settings["chat_template"]) == 16
    assert one.settings == {**plain.settings, "chat_template": one.settings["chat_template"]}
    assert one.settings != two.settings and one.settings == column(model).settings


@pytest.mark.parametrize(("template", "before"), [(SPACED, " "), (THINKING, "<think></think>")])
def test_what_a_template_writes_before_an_answer_is_read_and_not_asked(model, template, before):
    for prompt, answer, asked in read(column(model, template=template)):
        assert prompt.endswith(f"<a>{before}") and answer.isdecimal() and asked == [1] * 4


def test_tokens_over_the_seam_belong_to_the_answer():
    """A generation prompt that ends in a space which the tokenizer joins to the number."""
    tokenizer = chat_tokenizer(SPACED, merges=[("Ġ", "7")])
    row = token_row(tokenizer, Chat(tokenizer, "retrieval").pieces([Piece("?", False), Piece("71", True)]), False)
    assert tokenizer.decode(row.prompt).endswith("<a>") and tokenizer.decode(row.answers) == " 71"
    assert row.asked == [1, 1]


def test_rows_score_together_what_they_score_alone(model):
    scores = []
    for size in (1, 4):
        made = build_task("retrieval", {"lines": [3], "cases": 4, "queries": 2, "chat_template": True})
        (asked,) = made.columns(Subject(model, chat_tokenizer(), 7, size, None))
        scores.append(figures(asked, model, "kivi", residual=32))
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_a_needles_length_counts_the_template(model, tmp_path):
    text = str(save_text(tmp_path / "words.txt"))
    options = {"lengths": [220], "depths": [0, 1], "cases": 2, "text": text}
    asked = column(model, "needle", **options)
    for prompt, answer, _ in read(asked):
        assert prompt.startswith("<s><u>") and prompt.endswith(" is\n<a>") and answer in prompt
    assert 150 < asked.length < 220 and len(asked.settings["chat_template"]) == 16


@pytest.mark.parametrize(("task", "options"), [("retrieval", {}), ("needle", {"lengths": 200})])
def test_a_tokenizer_without_a_template_is_refused(model, task, options):
    made = build_task(task, {"chat_template": True, **options})
    with pytest.raises(UsageError, match="has no chat template; give a model that has one") as error:
        made.columns(Subject(model, toy_tokenizer(), 7, 4, None))
    assert f"tasks.{task}.chat_template is true" in message(error)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('no user here') }}", "chat template refuses a question (no user here)"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
            "does not begin an answer as its generation prompt does",
        ),
    ],
)
def test_templates_that_cannot_ask(model, template, text):
    with pytest.raises(UsageError) as error:
        column(model, template=template)
    assert text in message(error) and "give chat_template: false" in message(error)


@pytest.mark.parametrize("task", ["retrieval", "needle"])
def test_the_option_is_true_or_false(task):
    with pytest.raises(UsageError) as error:
        build_task(task, {"chat_template": "yes"})
    assert message(error) == f"'tasks.{task}.chat_template' must be true or false, got 'yes'"
