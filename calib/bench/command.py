"""What `calib bench` does: load the model, measure, write and print the results."""

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from calib.artifact_view.terminal import show
from calib.bench.bench_model import prepare
from calib.bench.document import document
from calib.bench.grid import measure, work
from calib.bench.page import markdown, page
from calib.bench.request import BenchRequest
from calib.bench.tables import failures, tables, too_small
from calib.runtime.files.atomic_file import write_atomically


def bench(request: BenchRequest, output: Path, command: str) -> int:
    """Runs the request; returns 1 if a row failed for another reason than lack of memory, else 0.

    Args:
        request: the checked request.
        output: folder that receives `results.json`, `report.md` and `report.html`.
        command: the command line, for the report.

    Raises:
        UsageError: if the model or the artifact does not allow the request.
        OSError: if the output folder cannot be written.
    """
    bench_model = prepare(request)
    output.mkdir(parents=True, exist_ok=True)  # made first, so that a wrong folder fails before anything is measured
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *left, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=work(bench_model))
        found = measure(bench_model, lambda what, tokens: progress.update(bar, advance=tokens, description=what))
    run = document(bench_model, found)
    text = json.dumps(run, indent=1, allow_nan=False) + "\n"
    write_atomically(output / "results.json", text.encode())
    write_atomically(output / "report.md", markdown(run, command).encode())
    write_atomically(output / "report.html", page(run, command).encode())
    show(tables(run))
    for line in (*failures(run), *too_small(run)):
        print(f"calib: {line}")
    print(f"wrote {output / 'report.html'}, {output / 'report.md'} and {output / 'results.json'}")
    return 1 if any("error" in row and not row["out_of_memory"] for row in (*found.cells, *found.largest)) else 0
