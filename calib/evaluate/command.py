"""What `calib eval` does with a request: prepare, measure, write, tell."""

from pathlib import Path

from calib.evaluate import report
from calib.evaluate.cell_files import CellFiles
from calib.evaluate.evaluation import chosen, measure, prepare
from calib.evaluate.request import Request
from calib.evaluate.table import CellProgress, print_table
from calib.runtime.atomic_file import write_atomically


def evaluate(request: Request, output: Path, only: list[str], fresh: bool, command: str) -> int:
    """Runs the request; returns 1 where a cell failed, else 0.

    Args:
        request: checked.
        output: folder that receives `results.json`, `report.md` and finished cells.
        only: patterns of the rows to run; the report holds the finished cells of the others.
        fresh: measure finished cells again.
        command: the words that were typed, for the report.

    Raises:
        UsageError: what the model, the tokenizer, the text or the artifact does not allow.
        OSError: the output folder cannot be written.
    """
    evaluation = prepare(request)
    files = CellFiles(output / "cells")
    wanted = chosen(evaluation, only)
    kept = {evaluation.key(cell): files.read(evaluation.key(cell)) for cell in evaluation.cells}
    results = {key: result for key, result in kept.items() if result is not None}
    for note in files.notes:
        print(f"calib: {note}")
    todo = [cell for cell in wanted if fresh or evaluation.key(cell) not in results]
    print(f"{len(wanted)} cells, {len(wanted) - len(todo)} of them finished before")
    with CellProgress(todo) as progress:
        results |= measure(evaluation, todo, files, progress.advance_cell)
    content = report.document(evaluation, results)
    write_atomically(output / "results.json", report.as_json(content).encode())
    write_atomically(output / "report.md", report.markdown(evaluation, results, command).encode())
    print_table(evaluation, results)
    failures = report.failed(evaluation, results)
    for cell in failures:
        print(f"calib: {cell.entry.label}, {cell.column.title} failed: {results[evaluation.key(cell)]['error']}")
    print(f"wrote {output / 'report.md'} and {output / 'results.json'}")
    return 1 if failures else 0
