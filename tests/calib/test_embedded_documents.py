"""The embedded model's documents, text, tokenizer and curriculum."""

import re

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from toy_pretraining import PROSE, curriculum
from transformers import AutoTokenizer

from benchmarks.embedded_model.curriculum import Curriculum
from benchmarks.embedded_model.phase import Phase
from benchmarks.embedded_model.token_rows import IGNORED, document_rows
from benchmarks.embedded_model.tokenizer import train_tokenizer
from calib.documents.corpus import TextSource, natural_spacing
from calib.documents.generators import copying, keyed_lines, keyed_random, retrieval_cases
from calib.documents.splits import split_of
from calib.documents.words import WORDS
from calib.errors import RunError, UsageError

# --- generators


def test_documents_depend_on_the_key_alone():
    def document(*key):
        return list(keyed_lines(keyed_random(*key), 12, queries=3))

    assert document(1, 2) == document(1, 2)
    assert document(1, 2) != document(1, 3)
    assert retrieval_cases(0, 5, 10) == retrieval_cases(0, 8, 10)[:5]


def test_the_generator_is_the_same_in_every_version():
    """A case with its text written out: if the generator changes, so does every artifact and model that is made from seeds."""
    case = retrieval_cases(0, 1, 2, digits=2)[0]
    assert (case.prompt, case.answer) == ("line floor: 21\nline tea: 46\n?\nline tea: ", "46")


@settings(deadline=None, max_examples=examples(40))
@given(
    lines=st.integers(1, 60),
    queries=st.integers(0, 90),
    digits=st.integers(1, 6),
    style=st.sampled_from(["line", "plain"]),
    split=st.sampled_from(["train", "eval"]),
    seed=st.integers(0, 1000),
)
def test_every_answer_stands_in_its_document(lines, queries, digits, style, split, seed):
    document = list(keyed_lines(keyed_random(seed), lines, queries, digits, style, split))
    text = "".join(piece.text for piece in document)
    context, _, asked = text.partition("?\n")
    pairs = dict(re.findall(r"(?:line )?(\w+):? (\d+)\n", context))
    assert len(pairs) == lines  # no key twice
    assert {len(number) for number in pairs.values()} == {digits}
    assert {split_of(word, number) for word, number in pairs.items()} == {split}
    answers = [piece.text for piece in document if piece.is_answer]
    asked_words = re.findall(r"(?:line )?(\w+):? \d+\n", asked)
    assert answers == [pairs[word] for word in asked_words]
    assert len(answers) == queries
    assert len(set(asked_words[:lines])) == min(lines, queries)


def test_training_and_evaluation_share_no_pair():
    seen = {split: set() for split in ("train", "eval")}
    for split, pairs in seen.items():
        for index in range(200):
            text = "".join(piece.text for piece in keyed_lines(keyed_random(index), 40, 0, 1, "plain", split))
            pairs |= set(re.findall(r"(\w+) (\d)", text))
    assert not seen["train"] & seen["eval"]
    assert {word for word, _ in seen["train"]} == {word for word, _ in seen["eval"]} == set(WORDS)
    assert len(seen["eval"]) == 2 * len(WORDS)  # one digit in five


def test_copying_repeats_its_sequence():
    first, *rest = copying(keyed_random(5), 30, repeats=3)
    assert not first.is_answer
    assert [(piece.text, piece.is_answer) for piece in rest] == [(first.text, True)] * 3
    assert len(first.text.split()) == 30


@pytest.mark.parametrize("wrong", [{"lines": 0}, {"lines": 10_000}, {"digits": 0}, {"queries": -1}, {"style": "poem"}])
def test_impossible_documents_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        list(keyed_lines(keyed_random(0), **{"lines": 5, **wrong}))


# --- text


def test_natural_spacing_of_tokenised_text():
    tokenised = 'He said , " a role @-@ playing game ( of 3 @.@ 5 m ) " ; it \'s old . \n = Title = \n'
    assert natural_spacing(tokenised) == 'He said, "a role-playing game (of 3.5 m)"; it\'s old. \n = Title = \n'


def test_text_that_cannot_be_had_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.txt"):
        TextSource(text=[tmp_path / "gone.txt"]).read()
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UsageError, match=r"empty\.txt is empty"):
        TextSource(text=[tmp_path / "empty.txt"]).read()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        TextSource(text=[tmp_path / "latin.txt"]).read()
    with pytest.raises(UsageError, match="no text"):
        TextSource().read()


def test_a_hub_name_without_network_says_what_to_do(monkeypatch):
    def unreachable(*arguments, **options):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(RunError, match=r"cannot get owner/name train .* without network give local text files"):
        TextSource(name="owner/name").read()


def test_hub_rows_are_joined_by_lines(monkeypatch):
    rows = datasets.Dataset.from_dict({"text": [" = T = \n", "no end of line"]})
    monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **options: rows)
    assert TextSource(name="owner/name", natural_spacing=False).read() == " = T = \nno end of line\n"
    with pytest.raises(UsageError, match=r"no column 'body' \(one of text\)"):
        TextSource(name="owner/name", column="body").read()


# --- tokenizer


def test_digits_are_single_and_words_are_whole(tokenizer):
    assert tokenizer("1906").input_ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.tokenize("1906 77") == [*"1906", "Ġ", *"77"]
    assert [word for word in WORDS if len(tokenizer.tokenize(word)) + len(tokenizer.tokenize(f" {word}")) != 2] == []
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert len(tokenizer) <= 2048


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_every_string_makes_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "line rain: 4821\n?\nÉtude…"
    assert again(text).input_ids == tokenizer(text).input_ids


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 259"):
        train_tokenizer(PROSE, vocabulary=200, documents=0)


# --- curriculum


def test_a_step_is_a_pure_function_of_seed_and_step(tokenizer):
    one, other = curriculum(tokenizer), curriculum(tokenizer)
    list(map(one.batch, range(4)))  # what was drawn before does not matter
    assert torch.equal(one.batch(7)["input_ids"], other.batch(7)["input_ids"])
    assert not torch.equal(one.batch(7)["input_ids"], one.batch(8)["input_ids"])
    assert not torch.equal(one.batch(7)["input_ids"], curriculum(tokenizer, seed=1).batch(7)["input_ids"])


def test_phases_follow_their_shares(tokenizer):
    shapes = [tuple(curriculum(tokenizer).batch(step)["input_ids"].shape) for step in range(10)]
    assert shapes == [(6, 64)] * 5 + [(4, 96)] * 5


def test_labels_are_the_tokens_of_text_and_answers(tokenizer):
    early, late = curriculum(tokenizer).batch(0), curriculum(tokenizer).batch(9)
    for batch in (early, late):
        labelled = batch["labels"] != IGNORED
        assert torch.equal(batch["labels"][labelled], batch["input_ids"][labelled])
        assert labelled.any(dim=1).all()
        assert (batch["input_ids"][:, 0] == tokenizer.bos_token_id).all()
    assert torch.equal(late["labels"][:2], late["input_ids"][:2])  # half the rows are language
    for ids, labels in zip(late["input_ids"][2:], late["labels"][2:], strict=True):
        answers = tokenizer.decode(labels[labels != IGNORED])
        assert answers.isdigit()
        assert "?" in tokenizer.decode(ids)


def test_pieces_give_the_tokens_of_the_whole_text(tokenizer):
    for index in range(20):
        style = "line" if index % 2 else "plain"
        pieces = list(keyed_lines(keyed_random(index), 8, queries=6, digits=1 + index % 4, style=style))
        whole = tokenizer("".join(piece.text for piece in pieces)).input_ids
        ((ids, labels),) = document_rows(tokenizer, [pieces], len(whole))
        assert ids == whole
        assert tokenizer.decode([i for i in labels if i != IGNORED]) == "".join(p.text for p in pieces if p.is_answer)


def test_impossible_curricula_are_refused(tokenizer):
    text = torch.zeros(50, dtype=torch.uint16).numpy()
    with pytest.raises(ValueError, match=r"sum to 0\.9"):
        Curriculum([Phase(0.9, 1, 64)], 10, tokenizer, text, 0)
    with pytest.raises(ValueError, match="50 tokens"):
        Curriculum([Phase(1, 1, 64)], 10, tokenizer, text, 0)
    with pytest.raises(ValueError, match="length=16"):
        Curriculum([Phase(1, 1, 16)], 10, tokenizer, text, 0)
    with pytest.raises(ValueError, match=r"text=1\.5"):
        Phase(1, 1, 64, text=1.5)
