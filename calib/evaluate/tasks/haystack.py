"""What needle and passkey share: a grid of lengths and depths, and a row of as many whole sentences as its length holds."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from calib.documents.running_text import RunningText
from calib.errors import UsageError
from calib.evaluate.tasks.contract import Subject, whole_number
from calib.runtime.messages.printable import printable

ATTEMPTS = 100  # positions of the text

Row = TypeVar("Row")


class Grid(Protocol):
    """A task with a column a length and `cases` independent cases at each depth."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cases: int


def check_grid(task: str, grid: Grid) -> None:
    """Makes tuples of the lengths and the depths; raises UsageError for what they cannot be."""
    for option, values, what in (
        ("lengths", grid.lengths, "a list of whole numbers"),
        ("depths", grid.depths, "a list of numbers from 0 to 1"),
    ):
        values = [values] if type(values) in (int, float) else values
        if not isinstance(values, list | tuple) or not values:
            raise UsageError(f"invalid value {printable(values)} for 'tasks.{task}.{option}' ({what})")
        object.__setattr__(grid, option, tuple(values))
    for option, value in (*(("lengths", length) for length in grid.lengths), ("cases", grid.cases)):
        whole_number(task, option, value, 1)
    for depth in grid.depths:
        if type(depth) not in (int, float) or not 0 <= depth <= 1:
            raise UsageError(f"invalid value {printable(depth)} for 'tasks.{task}.depths' (numbers from 0 to 1)")
    object.__setattr__(grid, "depths", tuple(map(float, grid.depths)))
    twice = next((depth for position, depth in enumerate(grid.depths) if depth in grid.depths[:position]), None)
    if twice is not None:
        raise UsageError(f"'tasks.{task}.depths' holds {printable(twice)} twice; name each depth once")


def check_lengths(task: str, grid: Grid, subject: Subject) -> None:
    """Raises UsageError for a length that the model was not made for."""
    for length in grid.lengths:
        subject.check_length(length, task, "give a smaller length")


def case_depths(grid: Grid, subject: Subject) -> list[tuple[int, float]]:
    """(case, depth) of each row; a limit cuts the last cases off."""
    count = len(grid.depths)
    return [(row // count, grid.depths[row % count]) for row in range(subject.rows(grid.cases * count))]


def running_text(task: str, subject: Subject, text: str) -> RunningText:
    """The text by the sentence; UsageError where it has none, or a tokenizer that cannot count them."""
    if not subject.tokenizer.is_fast:
        raise UsageError(f"tasks.{task}: this tokenizer is none of the tokenizers library; leave the task out")
    try:
        return RunningText(subject.tokenizer, text)
    except ValueError as error:
        raise UsageError(f"tasks.{task}: {error}; give another text=FILE") from error


def anywhere(running: RunningText, rng: random.Random) -> Callable[[int], Iterator[list[str]]]:
    """Candidates of `filled`: consecutive sentences from a random position, then from others."""
    return lambda room: (running.window(rng, room) for _ in range(ATTEMPTS))


def from_the_first(running: RunningText) -> Callable[[int], Iterator[list[str]]]:
    """Candidates of `filled`: sentences from the text's first on, as many as fit, then fewer."""

    def candidates(room: int) -> Iterator[list[str]]:
        window = running.beginning(0, room)
        return (window[:count] for count in range(len(window), 0, -1))

    return candidates


def filled(
    task: str,
    length: int,
    running: RunningText,
    candidates: Callable[[int], Iterator[list[str]]],
    hide: Callable[[Sequence[str]], Row],
    tokens: Callable[[Row], int],
) -> Row:
    """The row that `hide` makes of as many whole sentences as leave it within `length` tokens.

    Args:
        task: the task's name, for messages.
        length: of a row at most.
        running: the sentences.
        candidates: sentences of so many tokens at most, one choice after another.
        hide: the row of some sentences, without any as well.
        tokens: what a row takes.

    Raises:
        UsageError: no room for a sentence.
    """
    alone = tokens(hide([]))
    for sentences in candidates(length - alone):
        row = hide(sentences)
        # A first sentence may be longer than the room; at a seam a tokenizer may need one token more.
        if sentences and tokens(row) <= length:
            return row
    enough = alone + max(running.tokens)
    raise UsageError(f"tasks.{task}: length={length} leaves no room for text; give a length of {enough} or more")
