"""Measures every cell of the grid of batches and contexts, then the largest batches."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from calib.bench.bench_model import BenchModel
from calib.bench.cache_bytes import CacheBytes, measure_alone
from calib.bench.cell import Cell
from calib.bench.largest_batch import largest
from calib.bench.request import AGAIN, BenchRequest
from calib.bench.tables import failure
from calib.evaluate.entries import CacheEntry
from calib.evaluate.figures import number
from calib.log_lines import CELLS

Advance = Callable[[str, float], None]


@dataclass(frozen=True)
class Found:
    """Results as plain JSON: `cells` has an entry for each row, batch and context, `largest` one for each row and context."""

    cells: list[dict[str, Any]]
    largest: list[dict[str, Any]]


def measure(bench_model: BenchModel, advance: Advance) -> Found:
    """Measures all cells and the largest batches; `advance(what, tokens)` is called after each piece of work."""
    request, rows = bench_model.request, by_name(bench_model.request)
    warm_up(bench_model)
    cells, known = list[dict[str, Any]](), dict[tuple[str, int, int], CacheBytes]()
    measured, count = 0, len(request.contexts) * len(request.batches)
    for context in request.contexts:
        for batch in request.batches:

            def tell(name: str, batch: int = batch, context: int = context) -> None:
                advance(f"{name}, {batch} x {context}", batch * context)

            cell = Cell(bench_model, batch, context, rows, tell)
            cell.measure()
            measured += 1
            CELLS.info("%s of %s cells: %s x %s tokens: %s", measured, count, batch, context, told(cell))
            cells += cell.content()
            known |= {(name, batch, context): cache_bytes for name, cache_bytes in cell.cache_bytes.items()}
    return Found(cells, largest_batches(bench_model, known, advance))


def largest_batches(
    bench_model: BenchModel, known: dict[tuple[str, int, int], CacheBytes], advance: Advance
) -> list[dict[str, Any]]:
    """Returns the largest batch of every context and row; none without a limit of memory."""
    request, found = bench_model.request, list[dict[str, Any]]()
    if request.memory is None:
        return found
    count = len(request.contexts) * len(request.methods)
    for context in request.contexts:
        for entry in request.methods:
            row = largest(bench_model, entry, context, known, lambda name: advance(f"{name}, largest batch", 0))
            found.append(row)
            batch = failure(row) if "error" in row else row["computed"] if row["tried"] is None else row["tried"]
            CELLS.info("%s of %s largest batches: %s, %s tokens: %s", len(found), count, entry.label, context, batch)
    return found


def told(cell: Cell) -> str:
    """Returns the median tokens per second of every row of a cell, or how the row failed, as one line."""
    shown = []
    for row in cell.content():
        found = failure(row) if "error" in row else f"{number(row['tokens_per_second'][1])} tokens/s"
        shown.append(f"{row['name']} {found}")
    return ", ".join(shown)


def warm_up(bench_model: BenchModel) -> None:
    """Runs every row once on the smallest cell, so that what a first forward loads, compiles and keeps is not counted later."""
    prompt = bench_model.prompt(min(bench_model.request.batches), min(bench_model.request.contexts))
    for entry in bench_model.request.methods:
        with suppress(Exception):  # the failure is reported by the row's cell
            measure_alone(bench_model, entry, prompt)


def by_name(request: BenchRequest) -> dict[str, CacheEntry]:
    """Returns the rows of every table by name: the baseline, the others, and the baseline again."""
    own = {entry.label: entry for entry in request.methods}
    first = request.baseline or next(iter(own))
    return {first: own[first], **own, first + AGAIN: own[first]}


def work(bench_model: BenchModel) -> float:
    """Returns the number of tokens that `advance` is called with in total."""
    request = bench_model.request
    rows, prompts = len(request.methods), sum(request.contexts) * sum(request.batches)
    return prompts * (rows + 2 * request.turns * (rows + 1))
