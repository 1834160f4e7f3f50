"""Training and evaluation share no pair of key and number, and no two neighbouring keys; needles and their text."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from toy_pretraining import PROSE, curriculum

from benchmarks.embedded_model.cases import multi_query_batch, needle_batch, retrieval_batch
from benchmarks.embedded_model.phase import Phase
from benchmarks.embedded_model.token_rows import IGNORED
from calib.documents.corpus import natural_spacing
from calib.documents.generators import NUMBERS, keyed_lines, keyed_random, needles
from calib.documents.running_text import RunningText, sentences
from calib.documents.splits import keys_for, split_of, split_of_neighbours
from calib.documents.words import WORDS

LINE = re.compile(r"^(?:line )?(\w+):? (\d+)$", re.MULTILINE)
NEEDLE = re.compile(r"The number of (\w+) is (\d+)")


def keys_and_pairs(split, keys, documents=150):
    """Return the unordered pairs of neighbouring keys, and the pairs of key and number, of many documents."""
    neighbours, pairs = set(), set()
    for index in range(documents):
        pieces = keyed_lines(keyed_random("split", index), 40, 0, 2, "plain", split, keys)
        found = LINE.findall("".join(piece.text for piece in pieces))
        assert len(found) == len({key for key, _ in found}) == 40
        pairs |= set(found)
        neighbours |= {frozenset(two) for two in pairwise(key for key, _ in found)}
    return neighbours, pairs


@pytest.mark.parametrize("keys", ["words", "numbers"])
def test_splits_are_disjoint(keys):
    train_neighbours, train_pairs = keys_and_pairs("train", keys)
    eval_neighbours, eval_pairs = keys_and_pairs("eval", keys)
    assert not train_neighbours & eval_neighbours
    assert not train_pairs & eval_pairs
    for found, share in ((eval_pairs, "eval"), (train_pairs, "train")):
        assert {split_of(*pair) for pair in found} == {share}
    assert {key for key, _ in eval_pairs} <= set(WORDS if keys == "words" else NUMBERS)


def test_a_fifth_of_all_neighbours_are_for_evaluation():
    two = [split_of_neighbours(a, b) for index, a in enumerate(WORDS) for b in WORDS[:index]]
    assert 0.19 < two.count("eval") / len(two) < 0.21
    assert all(split_of_neighbours(a, b) == split_of_neighbours(b, a) for a, b in pairwise(WORDS))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_as_many_keys_as_are_promised(split):
    most = len(WORDS) - 60
    assert len(set(keys_for(keyed_random(0), WORDS, most, split))) == most
    for wrong in (0, most + 1):
        with pytest.raises(ValueError, match=f"lines={wrong}: a document has 1 to {most}"):
            keys_for(keyed_random(0), WORDS, wrong, split)


# --- needles


@settings(deadline=None, max_examples=examples(40))
@given(
    depths=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    count=st.integers(0, 12),
    split=st.sampled_from(["train", "eval"]),
    seed=st.integers(0, 1000),
)
def test_needles_stand_where_they_are_asked_and_answer_their_questions(depths, count, split, seed):
    filler = [f" Sentence {letter}." for letter in "abcdefghijkl"[:count]]
    pieces = list(needles(keyed_random(seed), filler, depths, split=split))
    text, _, questions = "".join(piece.text for piece in pieces).partition("\n?\n")
    pairs = dict(NEEDLE.findall(text))
    assert len(pairs) == len(depths)
    assert dict(NEEDLE.findall(questions)) == pairs
    assert [piece.text for piece in pieces if piece.is_answer] == [number for _, number in NEEDLE.findall(questions)]
    assert {split_of(*pair) for pair in pairs.items()} == {split}
    assert "".join(sentence for sentence in re.findall(r" Sentence \w\.", text)) == "".join(filler)
    before = sorted(len(re.findall("Sentence", text[: found.start()])) for found in NEEDLE.finditer(text))
    assert before == sorted(round(depth * count) for depth in depths)


@pytest.mark.parametrize("depths", [[], [-0.1], [0.5, 1.1]])
def test_impossible_depths_are_refused(depths):
    with pytest.raises(ValueError, match="depths="):
        list(needles(keyed_random(0), [" A."], depths))


@settings(deadline=None)
@given(text=st.text(alphabet="ab A.!?\n\"'1", max_size=80))
def test_sentences_are_the_text_again(text):
    assert "".join(sentences(text)) == text


def test_a_window_is_as_long_as_it_is_asked_and_no_longer(tokenizer):
    running = RunningText(tokenizer, natural_spacing(" It was so . Then it was not , he said .\n" + PROSE) * 3)
    for seed in range(10):
        window = running.window(keyed_random(seed), 60)
        length = len(tokenizer("".join(window), add_special_tokens=False).input_ids)
        assert 60 - max(running.tokens) < length <= 60
    with pytest.raises(ValueError, match="no sentence"):
        RunningText(tokenizer, "9" * 300)


# --- cases and curriculum


def decoded(tokenizer, row):
    return tokenizer.decode([token for token in row if token != tokenizer.pad_token_id])


def test_cases_are_of_the_eval_split(tokenizer):
    running = RunningText(tokenizer, PROSE * 9)
    needle = needle_batch(tokenizer, 3, 10, running, 100)
    multi = multi_query_batch(tokenizer, 3, 4, 12, 3)
    for pattern, batch in (
        (NEEDLE, needle),
        (LINE, multi),
        (LINE, retrieval_batch(tokenizer, 3, 4, 12, keys="numbers")),
    ):
        texts = [decoded(tokenizer, row) for row in batch["input_ids"].tolist()]
        assert {split_of(*pair) for text in texts for pair in pattern.findall(text)} == {"eval"}
        assert len(set(texts)) == len(texts)
    assert ((multi["labels"] != IGNORED).sum(dim=1) == 12).all()  # three answers of four digits
    assert ((needle["labels"] != IGNORED).sum(dim=1) == 4).all()
    positions = [NEEDLE.search(decoded(tokenizer, row)).start() for row in needle["input_ids"].tolist()]
    assert positions[0] < 10 and positions[-1] > max(positions[:5])


def test_a_phase_mixes_what_it_says(tokenizer):
    phase = Phase(1, rows=8, length=256, text=0.25, needle=0.5, digits=(4,), number_keys=1)
    assert phase.counts() == (2, 0, 3, 3)
    batch = curriculum(tokenizer, phases=[phase], prose=PROSE * 20).batch(3)
    assert batch["input_ids"].shape == (8, 256)
    texts = [decoded(tokenizer, row) for row in batch["input_ids"].tolist()]
    assert [bool(NEEDLE.search(text)) for text in texts] == [False] * 2 + [True] * 3 + [False] * 3
    for text, labels in zip(texts[2:], batch["labels"].tolist()[2:], strict=True):
        answers = tokenizer.decode([label for label in labels if label != IGNORED])
        numbers = [number for _, number in (NEEDLE if NEEDLE.search(text) else LINE).findall(text.partition("?\n")[2])]
        assert answers.startswith("".join(numbers)) and numbers
    assert all(len(key) == 3 and key.isdigit() for text in texts[5:] for key, _ in LINE.findall(text))


def test_a_needle_row_of_any_length_ends_with_all_its_answers(tokenizer):
    for length in (80, 128, 512):
        phase = Phase(1, rows=4, length=length, text=0, needle=1)
        batch = curriculum(tokenizer, phases=[phase], prose=PROSE * 20).batch(0)
        for ids in batch["input_ids"].tolist():
            text, _, questions = decoded(tokenizer, ids).partition("\n?\n")
            assert sorted(NEEDLE.findall(text)) == sorted(NEEDLE.findall(questions))


def test_impossible_phases_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"copying=0\.6, needle=0\.6"):
        Phase(1, 1, 64, copying=0.6, needle=0.6)
    with pytest.raises(ValueError, match="digits"):
        Phase(1, 1, 64, digits=())
    with pytest.raises(ValueError, match="running text"):
        curriculum(tokenizer, phases=[Phase(1, 1, 256, needle=0.5)])
    with pytest.raises(ValueError, match=r"length=50: a needle"):
        curriculum(tokenizer, phases=[Phase(1, 1, 50, text=0, needle=1)], prose=PROSE)


def test_batches_are_reproducible_with_needles(tokenizer):
    phases = [Phase(1, rows=4, length=128, text=0, needle=0.5, number_keys=0.5)]
    one, other = (curriculum(tokenizer, phases=phases, prose=PROSE * 20) for _ in range(2))
    assert np.array_equal(one.batch(5)["input_ids"], other.batch(5)["input_ids"])
