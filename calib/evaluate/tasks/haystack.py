"""Shared code of needle and passkey: the grid of lengths and depths, and rows of as many whole sentences as fit into a length."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from calib.documents.running_text import RunningText
from calib.errors import UsageError
from calib.evaluate.tasks.contract import Subject, whole_number
from calib.runtime.messages.printable import printable

ATTEMPTS = 100  # start positions in the text that are tried

Row = TypeVar("Row")


class Grid(Protocol):
    """A task with one column for each length and `cases` independent cases at each depth."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cases: int


def check_grid(task: str, grid: Grid) -> None:
    """Converts the task's lengths and depths to tuples; raises UsageError for invalid ones."""
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
    """Raises UsageError if a length exceeds the model's positions."""
    for length in grid.lengths:
        subject.check_length(length, task, "give a smaller length")


def case_depths(grid: Grid, subject: Subject) -> list[tuple[int, float]]:
    """Returns (case, depth) of each row; a limit cuts off the last rows."""
    count = len(grid.depths)
    return [(row // count, grid.depths[row % count]) for row in range(subject.rows(grid.cases * count))]


def running_text(task: str, subject: Subject, text: str) -> RunningText:
    """Splits the text into sentences with their token counts; raises UsageError for a slow tokenizer or text without sentences."""
    if not subject.tokenizer.is_fast:
        raise UsageError(
            f"tasks.{task}: a fast tokenizer is needed (of the tokenizers library), and this is a slow one; leave the task out"
        )
    try:
        return RunningText(subject.tokenizer, text)
    except ValueError as error:
        raise UsageError(f"tasks.{task}: {error}; give another text=FILE") from error


def anywhere(running: RunningText, rng: random.Random) -> Callable[[int], Iterator[list[str]]]:
    """Candidates for `filled`: consecutive sentences from `ATTEMPTS` random positions, one after another."""
    return lambda room: (running.window(rng, room) for _ in range(ATTEMPTS))


def from_the_first(running: RunningText) -> Callable[[int], Iterator[list[str]]]:
    """Candidates for `filled`: sentences from the beginning of the text, first as many as fit, then fewer."""

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
    """Returns a row of at most `length` tokens, from the first candidate sentences that fit.

    Args:
        task: the task's name, for messages.
        length: most tokens of a row.
        running: the sentences of the text.
        candidates: yields choices of sentences with about the given number of tokens at most.
        hide: makes a row from some sentences, also from none.
        tokens: counts the tokens of a row.

    Raises:
        UsageError: if no sentence fits.
    """
    alone = tokens(hide([]))
    for sentences in candidates(length - alone):
        row = hide(sentences)
        # The first sentence may be too long, and joining texts may add a token.
        if sentences and tokens(row) <= length:
            return row
    enough = alone + max(running.tokens)
    raise UsageError(f"tasks.{task}: length={length} leaves no room for text; give a length of {enough} or more")
