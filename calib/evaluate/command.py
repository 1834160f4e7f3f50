"""What `calib eval` does: measure a request and write its reports, write its cases, or compare two runs."""

from collections.abc import Mapping
from pathlib import Path

from calib.artifact_view.terminal import show
from calib.evaluate import report
from calib.evaluate.cases import cases as written_cases
from calib.evaluate.cell import Result
from calib.evaluate.cell_files import CellFiles
from calib.evaluate.compare import compared
from calib.evaluate.evaluation import Evaluation, chosen, measure, prepare
from calib.evaluate.models import beside
from calib.evaluate.models import page as models_page
from calib.evaluate.page.page import Drawn, page
from calib.evaluate.request import Request
from calib.evaluate.reuse import EarlierRun, taken_over
from calib.evaluate.run_file import read_run
from calib.evaluate.table import CellProgress, print_table
from calib.html_page.table import printable
from calib.runtime.files import canonical_json
from calib.runtime.files.atomic_file import write_atomically


def evaluate(
    request: Request,
    output: Path,
    only: list[str],
    fresh: bool,
    command: str,
    old: str | None = None,
    drawn: Drawn | None = None,
    reuse: str | None = None,
) -> int:
    """Runs the request and writes its reports; returns 1 if a cell failed, else 0.

    Args:
        request: the checked request.
        output: folder that receives `results.json`, `report.md`, `report.html` and finished cells.
        only: patterns of the rows to run; of the other rows the report has the finished cells.
        fresh: measure finished cells again.
        command: the command line, for the report.
        old: the `results.json` of an earlier run to compare with.
        drawn: an additional part of the HTML page, such as the curves of a `calib bench` run.
        reuse: the `results.json` of an earlier run whose cells are taken over if they have the same key.

    Raises:
        UsageError: if the model, the tokenizer, the text or the artifact does not allow the request, if `old` or `reuse` is not
            a run of `calib eval`, or if no cell of `reuse` can be taken over.
        OSError: if the output folder cannot be written.
    """
    then = None if old is None else read_run(old)  # read first, so that a wrong file fails before anything is loaded
    earlier = None if reuse is None else EarlierRun.read(reuse)
    evaluation = prepare(request)
    cells = CellFiles(output / "cells")
    wanted = chosen(evaluation, only)
    kept = {evaluation.key(cell): cells.read(evaluation.key(cell), cell.column) for cell in evaluation.cells}
    results = {key: result for key, result in kept.items() if result is not None}
    notes = list(cells.notes)
    if earlier is not None:
        results, told = with_earlier(evaluation, earlier, results, cells)
        notes += told
    for note in notes:
        print(f"calib: {printable(note)}")  # a quoted file may hold terminal control codes
    todo = [cell for cell in wanted if fresh or evaluation.key(cell) not in results]
    print(f"{len(wanted)} cells, {len(wanted) - len(todo)} of them finished before")
    with CellProgress(todo) as progress:
        results |= measure(evaluation, todo, cells, progress.advance_cell, progress.finish_cell)
    text = report.as_json(report.document(evaluation, results))
    now = canonical_json.loads(text)
    further = [] if then is None else compared(now, then, str(old))
    files = {
        "results": (output / "results.json", text),
        "markdown": (output / "report.md", report.markdown(evaluation, results, command, further)),
        "report": (output / "report.html", page(now, command, further, drawn)),
    }
    for path, content in files.values():
        write_atomically(path, content.encode())
    if todo:
        from calib.evaluate.tracking import track  # slow to import, so only if cells were measured

        track(now, output / "logs", {kind: path for kind, (path, _) in files.items()})
    print_table(evaluation, results)
    show(further)
    failures = report.failed(evaluation, results)
    for cell in failures:
        print(f"calib: {cell.entry.label}, {cell.column.title} failed: {results[evaluation.key(cell)]['error']}")
    print(f"wrote {output / 'report.html'}, {output / 'report.md'} and {output / 'results.json'}")
    return 1 if failures else 0


def with_earlier(
    evaluation: Evaluation, earlier: EarlierRun, results: dict[str, Result], cells: CellFiles
) -> tuple[dict[str, Result], list[str]]:
    """Adds the cells of an earlier run that have the same keys to the finished `results`, and writes them as finished cells.

    Returns the results and notes to print.
    """
    found = taken_over(evaluation, earlier, results)
    new = {key: result for key, result in found.results.items() if key not in results}
    for key, result in new.items():
        cells.write(key, result)
    return results | new, [f"{len(new)} cells are taken over from {earlier.name}", *found.notes]


def evaluate_models(requests: Mapping[str, Request], output: Path, only: list[str], fresh: bool, command: str) -> int:
    """Runs the requests one after another, each with its model's name as output folder, and writes a table of all models into
    `models.md`; returns 1 if any cell failed, else 0. Raises the same errors as `evaluate`."""
    folders = {name: output / name for name in requests}
    statuses = []
    for name, request in requests.items():
        print(f"model {name}: {request.model}")
        statuses.append(evaluate(request, folders[name], only, fresh, command))
    tables = beside({name: read_run(str(folder / "results.json")) for name, folder in folders.items()})
    write_atomically(output / "models.md", models_page(tables, folders, command).encode())
    show(tables)
    print(f"wrote {output / 'models.md'}")
    return max(statuses)


def write_cases(request: Request, path: Path) -> int:
    """Writes the cases of the request's columns for another program to answer; raises UsageError and OSError."""
    text = written_cases(prepare(request))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    print(f"wrote {path}")
    return 0


def compare_files(old: str, new: str) -> int:
    """Prints a comparison of the runs in the files `old` and `new`; raises UsageError if a file is not a run."""
    then, now = read_run(old), read_run(new)
    show(compared(now, then, old))
    return 0
