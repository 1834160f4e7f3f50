"""Generated documents whose answers can be looked up in their own context, to train and test retrieval.

A document is a sequence of pieces; a piece is text and whether it is an answer, so that a loss or a score can be computed on
the answers alone. Every document depends only on the `random.Random` that is passed in; `keyed_random` makes one from a seed.
`split` separates training documents from evaluation documents, which share no pair of key and number and no two neighbouring
keys (`calib.documents.splits`).

    line rain: 4821          keyed lines, style "line"; style "plain" is `rain 4821`
    line milk: 1190          with numbers as keys: `line 307: 1190`
    ?
    line milk: 1190          a query is the line again; only its number is an answer; several queries: multi-query

    ... was built in 1906. The number of rain is 4821. The church ...      a needle in running text, then
    ?
     The number of rain is 4821                                            the question
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from calib.documents.splits import Split, keys_for, number_for
from calib.documents.words import WORDS
from calib.runtime.messages.printable import printable

Style = Literal["line", "plain"]
Keys = Literal["words", "numbers"]
NUMBERS: tuple[str, ...] = tuple(f"{number:03d}" for number in range(1000))
POOLS = {"words": WORDS, "numbers": NUMBERS}


class Piece(NamedTuple):
    """A part of a document's text, and whether it is an answer, to be predicted."""

    text: str
    is_answer: bool


@dataclass(frozen=True)
class RetrievalCase:
    """A prompt that ends just before the number that answers it, and that number."""

    prompt: str
    answer: str


def keyed_random(*key: object) -> random.Random:
    """Returns a generator seeded by `key` alone, the same in every process (Python seeds it by the text's SHA-512)."""
    return random.Random("/".join(map(str, key)))


def keyed_lines(
    rng: random.Random,
    lines: int,
    queries: int = 1,
    digits: int = 4,
    style: Style = "line",
    split: Split = "train",
    keys: Keys = "words",
) -> Iterator[Piece]:
    """Yields `lines` keyed lines without a repeated key, `?`, and `queries` queries, each followed by its answer.

    Queries ask for the keys in random order; if there are more queries than lines, again in another order. Raises ValueError
    for counts, a style or keys that are not possible.
    """
    if digits < 1 or queries < 0:
        raise ValueError(f"digits={digits}, queries={queries}: need at least 1 digit and no negative number of queries")
    if style not in ("line", "plain"):
        raise ValueError(f"style={printable(style)}: one of 'line', 'plain'")
    if keys not in POOLS:
        raise ValueError(f"keys={printable(keys)}: one of 'words', 'numbers'")
    chosen = keys_for(rng, POOLS[keys], lines, split)
    pairs = [(f"line {key}: " if style == "line" else f"{key} ", number_for(rng, key, digits, split)) for key in chosen]
    for key, number in pairs:
        yield Piece(f"{key}{number}\n", False)
    yield Piece("?\n", False)
    order: list[tuple[str, str]] = []
    for _ in range(queries):
        if not order:
            order = rng.sample(pairs, lines)
        key, number = order.pop()
        yield Piece(key, False)
        yield Piece(number, True)
        yield Piece("\n", False)


def needles(
    rng: random.Random, sentences: Sequence[str], depths: Sequence[float], digits: int = 4, split: Split = "train"
) -> Iterator[Piece]:
    """Yields running text with one needle sentence at each of `depths`, `?`, and a question for each in random order.

    A needle names a word and a number: ` The number of rain is 4821.` Depth 0 is before the first sentence, 1 after
    the last. `sentences` include their leading spaces (`RunningText`). Raises ValueError without depths, or for a depth
    outside 0 to 1.
    """
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths={list(depths)}: at least one, each between 0 (the beginning) and 1 (the end)")
    words = rng.sample(WORDS, len(depths))
    pairs = [(f" The number of {word} is ", number_for(rng, word, digits, split)) for word in words]
    at: dict[int, list[str]] = {}
    for depth, (key, number) in zip(depths, pairs, strict=True):
        at.setdefault(round(depth * len(sentences)), []).append(f"{key}{number}.")
    for place in range(len(sentences) + 1):
        for text in at.get(place, []):
            yield Piece(text, False)
        if place < len(sentences):
            yield Piece(sentences[place], False)
    yield Piece("\n?\n", False)
    for key, number in rng.sample(pairs, len(pairs)):
        yield Piece(key, False)
        yield Piece(number, True)
        yield Piece("\n", False)


def copying(rng: random.Random, length: int, repeats: int = 1, split: Split = "train") -> Iterator[Piece]:
    """Yields a random sequence of `length` words and one- to four-digit numbers, then the same `repeats` more times.

    Every repetition is an answer. A number's pair with the last word before it belongs to `split`.
    """
    if length < 1 or repeats < 0:
        raise ValueError(f"length={length}, repeats={repeats}: need at least 1 item and no negative number of repeats")
    items: list[str] = []
    word = rng.choice(WORDS)
    while len(items) < length:
        if rng.random() < 0.5:
            word = rng.choice(WORDS)
            items.append(word)
        else:
            items.append(number_for(rng, word, rng.choice((1, 2, 4)), split))
    sequence = " ".join(items)
    yield Piece(f"{sequence}\n", False)
    for _ in range(repeats):
        yield Piece(f"{sequence}\n", True)


def retrieval_cases(
    seed: int,
    count: int,
    lines: int,
    digits: int = 4,
    style: Style = "line",
    keys: Keys = "words",
) -> list[RetrievalCase]:
    """Returns `count` independent cases of the split "eval" with one query each; case i depends on all arguments but `count`."""
    cases = []
    for index in range(count):
        rng = keyed_random("retrieval", seed, index, lines, digits, style, "eval", keys)
        *prompt, answer, _ = keyed_lines(rng, lines, 1, digits, style, "eval", keys)
        cases.append(RetrievalCase("".join(piece.text for piece in prompt), answer.text))
    return cases
