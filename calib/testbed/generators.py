"""Documents made on the spot, whose answers can be looked up in their own context: they teach and test retrieval.

A document is a list of pieces; a piece is text and whether it is an answer, so that a loss or a score can be taken on
the answers alone. Everything is a pure function of the `random.Random` that is passed in.

    line rain: 4821          keyed lines, style "line"; style "plain" is `rain 4821`
    line milk: 1190
    ?
    line milk: 1190          a query is the line again; only its number is an answer

Training and evaluation never share a pair: a word and a number belong to `split="eval"` where
(crc32(word) + number) mod 5 = 0 and to `split="train"` elsewhere, so every word has one eval number in five of any
length. Words themselves are shared, because a key that was never trained on would measure its embedding only.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from calib.testbed.words import WORDS

Split = Literal["train", "eval"]
Style = Literal["line", "plain"]
EVAL_ONE_IN = 5


class Piece(NamedTuple):
    """A stretch of a document and whether it is to be predicted."""

    text: str
    is_answer: bool


@dataclass(frozen=True)
class RetrievalCase:
    """A prompt that ends just before the number that answers it, and that number."""

    prompt: str
    answer: str


def keyed_random(*key: object) -> random.Random:
    """A generator that depends on the key alone, the same in every process (strings are seeded by their SHA-512)."""
    return random.Random("/".join(map(str, key)))


def split_of(word: str, number: str) -> Split:
    """The one split to which the pair belongs."""
    return "eval" if (zlib.crc32(word.encode()) + int(number)) % EVAL_ONE_IN == 0 else "train"


def number_for(rng: random.Random, word: str, digits: int, split: Split) -> str:
    """A number of exactly `digits` digits (leading zeros allowed) whose pair with `word` belongs to `split`."""
    while True:  # one draw in five, or four in five, succeeds
        number = f"{rng.randrange(10**digits):0{digits}d}"
        if split_of(word, number) == split:
            return number


def keyed_lines(
    rng: random.Random,
    lines: int,
    queries: int = 1,
    digits: int = 4,
    style: Style = "line",
    split: Split = "train",
) -> Iterator[Piece]:
    """Yields `lines` keyed lines without a repeated key, `?`, and `queries` queries, each followed by its answer.

    Queries go through the keys in random order, and come around in another order when there are more queries than
    lines. Raises ValueError for counts that cannot be met.
    """
    if not 1 <= lines <= len(WORDS):
        raise ValueError(f"lines={lines}: a document has 1 to {len(WORDS)} keyed lines (the size of the word list)")
    if digits < 1 or queries < 0:
        raise ValueError(f"digits={digits}, queries={queries}: need at least 1 digit and no negative number of queries")
    if style not in ("line", "plain"):
        raise ValueError(f"style={style!r}: one of 'line', 'plain'")
    words = rng.sample(WORDS, lines)
    pairs = [
        (f"line {word}: " if style == "line" else f"{word} ", number_for(rng, word, digits, split)) for word in words
    ]
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


def copying(rng: random.Random, length: int, repeats: int = 1, split: Split = "train") -> Iterator[Piece]:
    """Yields a random sequence of `length` words and one- to four-digit numbers, then the same `repeats` more times.

    Every repetition is an answer. Words are followed by numbers of the split's pairs.
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
    seed: int, count: int, lines: int, digits: int = 4, style: Style = "line", split: Split = "eval"
) -> list[RetrievalCase]:
    """`count` independent single-query cases; case i is a pure function of (seed, i, lines, digits, style, split)."""
    cases = []
    for index in range(count):
        rng = keyed_random("retrieval", seed, index, lines, digits, style, split)
        *prompt, answer, _ = keyed_lines(rng, lines, 1, digits, style, split)
        cases.append(RetrievalCase("".join(piece.text for piece in prompt), answer.text))
    return cases
