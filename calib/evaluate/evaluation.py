"""The steps of an evaluation: load the model, check every method and task, then measure the cells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from typing import Any

from calib import __version__
from calib.errors import UsageError
from calib.evaluate.cell import Cell, Result
from calib.evaluate.cell_files import CellFiles
from calib.evaluate.entries import Entry, Given
from calib.evaluate.loaded import check_model, loaded
from calib.evaluate.products import multiply_in_float32
from calib.evaluate.request import Request
from calib.evaluate.tasks import Column, Subject
from calib.evaluate.tokenizer_identity import special_ids, tokenizer_identity
from calib.runtime.artifact.fingerprint import fingerprint
from calib.runtime.messages.dtype_name import dtype_name

VERSIONS = ("torch", "transformers")


@dataclass(frozen=True)
class Evaluation:
    """A request with its model loaded and everything checked.

    Attributes:
        request: the request.
        subject: the model, tokenizer and sizes from which the columns make their data.
        columns: columns of the table.
        cells: cells of the table, row by row.
        given: the model, artifact and tokenizer that the rows use.
        base: what all cells depend on: model, dtype, device, seed, batch size, versions.
        tokenizer: the hash of `tokenizer_identity`.
        special_tokens: the ids of `special_ids`.
    """

    request: Request
    subject: Subject
    columns: list[Column]
    cells: list[Cell]
    given: Given
    base: dict[str, Any]
    tokenizer: str
    special_tokens: dict[str, Any]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The table's rows."""
        return self.request.methods

    def key(self, cell: Cell) -> str:
        """Returns the cell's key in `CellFiles`: the hash of `base`, the cell, the tokenizer and the versions of used packages."""
        tokenizer = {"tokenizer": self.tokenizer, "special_tokens": self.special_tokens}
        return cell.key({**self.base, **tokenizer, "packages": cell.entry.packages})


def prepare(request: Request) -> Evaluation:
    """Loads the model and checks every method on every column; raises UsageError if the request cannot be run."""
    model, tokenizer, artifact, artifact_hash = loaded(
        request.model, request.dtype, request.device, request.artifact, request.threads
    )
    if request.products == "float32":
        multiply_in_float32(model)
    subject = Subject(model, tokenizer, request.seed, request.batch_size, request.limit)
    columns = [column for task in request.tasks for column in task.columns(subject)]
    cells = [
        Cell(entry, column, artifact_hash if entry.uses_artifact else None)
        for entry in request.methods
        for column in columns
        if entry.serves(column)
    ]
    identity = fingerprint(model)
    given = Given(model, request.seed, artifact, identity, tokenizer)
    for cell in cells:
        cell.entry.check(given, cell.column)
    check_model(artifact, model)
    base = {
        "config_hash": identity["config_hash"],
        "weights": identity["weights"],
        "dtype": dtype_name(model.dtype),
        "device": model.device.type,
        "seed": request.seed,
        "batch_size": request.batch_size,
        **({} if request.products == "model" else {"products": request.products}),
        "versions": {"calib": __version__, **{name: version(name) for name in VERSIONS}},
    }
    told = tokenizer_identity(tokenizer), special_ids(tokenizer)
    return Evaluation(request, subject, columns, cells, given, base, *told)


def chosen(evaluation: Evaluation, patterns: Sequence[str]) -> list[Cell]:
    """Returns the cells of the rows whose label matches one of `patterns` (`h2o*`), or all cells if there are no patterns.

    Raises UsageError if that selects no cell.
    """
    fits = {entry.label for entry in fitting(evaluation.entries, patterns)}
    found = [cell for cell in evaluation.cells if cell.entry.label in fits]
    if not found:
        raise UsageError(
            f"no cells: none of the tasks can be run with {', '.join(sorted(fits))}; give other methods or tasks"
        )
    return found


def fitting(entries: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """Returns the rows whose label matches one of `patterns`, or all; raises UsageError for a pattern that matches no row."""
    labels = [entry.label for entry in entries]
    for pattern in patterns:
        if not any(fnmatchcase(label, pattern) for label in labels):
            raise UsageError(f"--only '{pattern}' fits no method's name (there are {', '.join(labels)})")
    return [entry for entry in entries if not patterns or any(fnmatchcase(entry.label, one) for one in patterns)]


def measure(
    evaluation: Evaluation,
    cells: Sequence[Cell],
    files: CellFiles,
    advance: Callable[[Cell, float], None],
    finished: Callable[[Cell, Result], None] = lambda cell, result: None,
) -> dict[str, Result]:
    """Measures `cells` in order and returns their results by key; each result is written to `files` as soon as it is finished.

    The result of a cell that fails is `{"error": one line}`; it is not written and does not end the run. `advance(cell, tokens)`
    is called after each batch, `finished(cell, result)` after each cell that was measured or failed.
    """
    results: dict[str, Result] = {}
    for cell in cells:
        key = evaluation.key(cell)
        if "figures" in results.get(key, {}):  # another row has the same key
            advance(cell, cell.tokens)
            continue
        try:
            results[key] = cell.measure(evaluation.given, partial(advance, cell))
        except Exception as error:  # an error of a method, or too little memory, must not end the other cells
            results[key] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        else:
            files.write(key, results[key])
        finished(cell, results[key])
    return results
