"""The walk of a bench: every cell of the grid, then the largest batches."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from calib.bench.cell import Cell
from calib.bench.largest_batch import largest
from calib.bench.request import AGAIN
from calib.bench.subject import BenchSubject
from calib.bench.weighing import Weighed, weigh
from calib.evaluate.entries import CacheEntry

Advance = Callable[[str, float], None]


@dataclass(frozen=True)
class Found:
    """What was measured, as plain JSON: `cells` a row, batch and context each, `largest` a row and context each."""

    cells: list[dict[str, Any]]
    largest: list[dict[str, Any]]


def measure(subject: BenchSubject, advance: Advance) -> Found:
    """All of it; `advance(what, tokens)` is called as tokens of prompts go through."""
    request, rows = subject.request, by_name(subject)
    warm_up(subject)
    cells, known = list[dict[str, Any]](), dict[tuple[str, int, int], Weighed]()
    for context in request.contexts:
        for batch in request.batches:

            def tell(name: str, batch: int = batch, context: int = context) -> None:
                advance(f"{name}, {batch} x {context}", batch * context)

            cell = Cell(subject, batch, context, rows, tell)
            cell.measure()
            cells += cell.content()
            known |= {(name, batch, context): weighed for name, weighed in cell.weighed.items()}
    if request.memory is None:
        return Found(cells, [])
    return Found(
        cells,
        [
            largest(subject, entry, context, known, lambda name: advance(f"{name}, largest batch", 0))
            for context in request.contexts
            for entry in request.methods
        ],
    )


def warm_up(subject: BenchSubject) -> None:
    """Every row once through the smallest cell: what a first forward loads, compiles and keeps is no row's own memory."""
    prompt = subject.prompt(min(subject.request.batches), min(subject.request.contexts))
    for entry in subject.request.methods:
        with suppress(Exception):  # the row's own cell tells
            weigh(subject, entry, prompt)


def by_name(subject: BenchSubject) -> dict[str, CacheEntry]:
    """The rows of every table: the baseline, the others, and the baseline again."""
    own = {entry.label: entry for entry in subject.request.methods}
    first = subject.request.baseline or next(iter(own))
    return {first: own[first], **own, first + AGAIN: own[first]}


def work(subject: BenchSubject) -> float:
    """Tokens that `advance` will have been told of."""
    request = subject.request
    rows, prompts = len(request.methods), sum(request.contexts) * sum(request.batches)
    return prompts * (rows + 2 * request.turns * (rows + 1))
