"""Several queries of one prompt: which tokens are asked, and how each query is scored."""

import pytest
import torch
from one_line import message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_evaluation import answered, figures, subject
from toy_language_model import toy_model, toy_tokenizer
from transformers import PreTrainedTokenizerFast

from calib.documents.generators import Piece, retrieval_cases
from calib.errors import UsageError
from calib.evaluate.tasks import build_task
from calib.evaluate.tasks.answer_tokens import token_row
from calib.runtime import compress


@pytest.fixture(scope="module")
def model():
    return toy_model()


def column(model, lines=5, cases=4, queries=3, **options):
    task = build_task("retrieval", {"lines": [lines], "cases": cases, "queries": queries})
    return task.columns(subject(model, **options))[0]


def test_one_query_is_what_it_was(model):
    """Finished cells are found by these settings, and published figures were taken on these prompts."""
    one = column(model, queries=1, cases=6, batch_size=6)
    assert one.title == "5 lines" and one.settings == {
        "task": "retrieval",
        "lines": 5,
        "cases": 6,
        "digits": 4,
        "style": "line",
        "keys": "words",
    }
    (made,) = one.batches()
    tokenizer = toy_tokenizer()
    cases = sorted(retrieval_cases(7, 6, 5), key=lambda case: len(tokenizer(case.prompt)["input_ids"]))
    assert tokenizer.batch_decode(made.prompts, skip_special_tokens=True) == [case.prompt for case in cases]
    assert tokenizer.batch_decode(made.answers) == [case.answer for case in cases]
    assert bool((made.asked == 1).all())
    assert set(figures(one, model, "full")) == {"exact", "low", "high", "cases", "log_probability"}


def test_the_first_query_is_the_single_one(model):
    one, three = column(model, queries=1), column(model)
    assert three.title == "3 of 5 lines" and three.settings == {**one.settings, "queries": 3}
    single, several = one.batches()[0], three.batches()[0]
    assert torch.equal(single.prompts, several.prompts) and torch.equal(single.answers, several.answers[:, :4])
    assert three.prompt == one.prompt and three.length > one.length + 2 * 10


def test_the_tokens_that_are_asked_are_the_numbers_of_the_lines(model):
    made, tokenizer = column(model).batches()[0], toy_tokenizer()
    for prompt, answers, asked in zip(made.prompts, made.answers, made.asked, strict=True):
        *lines, last = tokenizer.decode(prompt, skip_special_tokens=True).split("\n")
        rest = tokenizer.decode(answers[: int(asked.nonzero().max()) + 1])
        questions = (last + rest).split("\n")
        assert len(set(questions)) == 3 and set(questions) < set(lines)
        for number, question in enumerate(questions, 1):
            assert tokenizer.decode(answers[asked == number]) == question.split(": ")[1]
        assert int((asked > 0).sum()) == 12


def test_log_probabilities_are_the_models_own(model):
    three = column(model, cases=3, batch_size=1)
    found, total = figures(three, model, "full"), 0.0
    for made in three.batches():
        whole = torch.cat((made.prompts, made.answers), 1)
        with torch.no_grad():
            logits = model(whole).logits[:, made.prompts.shape[1] - 1 : -1].double()
        total += float(logits.log_softmax(-1).gather(2, made.answers[..., None])[..., 0][made.asked > 0].sum())
    assert found["log_probability"] == pytest.approx(total / 36, abs=1e-4)


def test_every_query_is_exact_or_not_by_its_own_tokens(model):
    three = column(model)
    (made,) = three.batches()
    with torch.no_grad():
        # The model's predictions after the true tokens, row by row without padding.
        logits = [model(torch.cat((p[m > 0], a))[None]).logits[0] for p, m, a in zip(*made[:3], strict=True)]
    scores = []
    for row, asked in enumerate(made.asked):
        said = logits[row][-len(asked) - 1 : -1].argmax(-1)
        right = said == made.answers[row]
        scores.append([bool(right[asked == number].all()) for number in (1, 2, 3)])
    with compress(model, "full") as cache:
        exact, likely = three.measure(cache, made)
    assert exact.view(4, 3).tolist() == scores and len(likely) == 48
    # The model's own predictions, but for one token of each row; the first row's is not asked.
    short = made._replace(answers=made.answers[:, :6], asked=torch.tensor([[1, 1, 0, 2, 2, 3]] * 4))
    with compress(model, "full") as cache:
        exact, likely = three.measure(cache, answered(model, short, 6, {(0, 2), (1, 4), (2, 0), (3, 5)}))
    assert exact.view(4, 3).tolist() == [[True] * 3, [True, False, True], [False, True, True], [True, True, False]]
    assert len(likely) == 20


def test_shares_of_all_and_of_each_query(model):
    three = column(model)
    exact = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [True, False, False]])
    found = three.summary(
        [(exact[:3].flatten(), torch.full((9,), -1.0)), (exact[3:].flatten(), torch.full((3,), -2.0))]
    )
    assert found["exact"] == pytest.approx(7 / 12) and found["cases"] == 4
    assert found["log_probability"] == pytest.approx(-1.25)
    assert [found[f"exact at query {number}"] for number in (1, 2, 3)] == [1.0, 0.5, 0.25]
    assert 0 < found["low"] < 7 / 12 < found["high"] < 1
    all_right = three.summary([(torch.ones(12, dtype=torch.bool), torch.zeros(12))])
    assert all_right["high"] == pytest.approx(1) and 0.5 < all_right["low"] < 0.52  # of 4 cases, not of 12 answers


def test_tokens_over_a_seam_belong_to_the_answer():
    symbols = ["a", ":", " ", "1", "2", "\n", " 1", "2\n"]
    rules = [(" ", "1"), ("2", "\n")]
    tokenizer = Tokenizer(models.BPE({symbol: n for n, symbol in enumerate(symbols)}, merges=rules))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("~", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    pieces = [Piece("a: ", False), Piece("21", True), Piece("\na: ", False), Piece("12", True), Piece("\na: ", False)]
    row = token_row(fast, [*pieces, Piece("21", True), Piece("\n", False)])
    assert fast.decode(row.prompt + row.answers) == "a: 21\na: 12\na: 21"
    assert row.prompt == [0, 1, 2] and row.answers == [4, 3, 5, 0, 1, 6, 7, 0, 1, 2, 4, 3]
    assert row.asked == [1, 1, 0, 0, 0, 2, 2, 0, 0, 0, 3, 3]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"queries": 0}, "invalid value 0 for 'tasks.retrieval.queries' (a whole number, at least 1)"),
        ({"queries": True}, "invalid value True for 'tasks.retrieval.queries'"),
        (
            {"queries": 6, "lines": [9, 5]},
            "invalid value 6 for 'tasks.retrieval.queries' (at most 5, the fewest lines)",
        ),
    ],
)
def test_wrong_numbers_of_queries(options, text):
    with pytest.raises(UsageError) as error:
        build_task("retrieval", options)
    assert text in message(error)


def test_many_queries_of_a_short_context(model):
    with pytest.raises(
        UsageError, match=r"retrieval from 8 lines takes \d+ tokens .* made for 256; ask for fewer lines"
    ):
        column(model, lines=8, queries=8)
