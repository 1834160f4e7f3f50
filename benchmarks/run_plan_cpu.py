"""Compares `calib eval --plan` and `calib bench --plan` for the embedded model with the runs themselves.

    python -m benchmarks.run_plan_cpu [--write]

`eval/quick.yaml` and `bench/quick.yaml` on the CPU, each planned before and after its run. Caches: planned over measured bytes of
every row. Memory, of `bench`: planned cache, activations and logits over the peak of a row above the weights, as reported by the
operating system. Seconds: those of an evaluation's cells, and those of a bench without loading. All on one thread.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan_page import PAGE, printed, rewrite
from benchmarks.protocol import keep
from calib.bench import bench_model, grid
from calib.bench.request_files import read_bench
from calib.evaluate import evaluation
from calib.evaluate.cell_files import CellFiles
from calib.evaluate.request_files import read_request
from calib.plan.bench_plan import make_bench_plan
from calib.plan.eval_plan import make_eval_plan

RESULT = "run_plan_cpu.json"
THREADS = 1
Numbers = dict[str, Any]


def evaluated() -> Numbers:
    """Returns for the evaluation planned over measured cache bytes of every row and column, and the seconds of every column."""
    request = read_request(["eval/quick.yaml"], [])
    before = make_eval_plan(request)
    prepared = evaluation.prepare(request)
    with tempfile.TemporaryDirectory() as folder:
        results = evaluation.measure(prepared, prepared.cells, CellFiles(Path(folder)), lambda cell, tokens: None)
    after = make_eval_plan(request)
    taken: dict[str, float] = {}
    bytes_: dict[tuple[str, str], float] = {}
    for cell in prepared.cells:
        found, batches = results[prepared.key(cell)], len(cell.column.batches())
        taken[cell.column.title] = taken.get(cell.column.title, 0) + found["seconds"]
        bytes_[cell.entry.label, cell.column.title] = found["sizes"]["measured_bytes"] / batches
    caches = [one["device_bytes"] / bytes_[one["name"], one["column"]] for one in before["caches"]]
    return {"caches": caches, "seconds": seconds([before, after], taken)}


def benched() -> Numbers:
    """Returns for the bench planned over measured cache bytes and peak memory of every row and context, and the seconds in all."""
    request = read_bench(["bench/quick.yaml"], [])
    before = make_bench_plan(request)
    model = bench_model.prepare(request)
    start = time.perf_counter()
    found = grid.measure(model, lambda what, tokens: None)
    taken = time.perf_counter() - start
    after = make_bench_plan(request)
    planned = {(cell["context"], name): (cell, one) for cell in before["cells"] for name, one in cell["rows"].items()}
    caches, memory = [], []
    for row in (row for row in found.cells if "sizes" in row):
        cell, one = planned[row["context"], row["name"]]
        caches.append(one["device_bytes"] / row["sizes"]["measured_bytes"])
        memory.append((one["device_bytes"] + cell["beside"]) / max(row["peak_bytes"].values()))
    return {"caches": caches, "memory": memory, "seconds": seconds([before, after], {"all": taken})}


def seconds(plans: list[Numbers], taken: dict[str, float]) -> Numbers:
    """Returns by part the seconds planned before and after, those measured, and measured over planned."""
    found = {}
    for name, measured in {**taken, "all": sum(taken.values())}.items():
        told = [plan["seconds"]["total"] if name == "all" else plan["seconds"]["stages"][name] for plan in plans]
        ratios = [round(measured / one, 2) for one in told]
        found[name] = {"planned": [round(one, 1) for one in told], "measured": round(measured, 1), "ratio": ratios}
    return found


def span(values: list[float]) -> list[float]:
    """Returns the least and the largest value."""
    return [round(min(values), 3), round(max(values), 3)]


def run() -> Numbers:
    """Returns the results of both, with lists shortened to their least and largest value."""
    both = {"eval": evaluated(), "bench": benched()}
    return {
        name: {key: span(value) if isinstance(value, list) else value for key, value in found.items()}
        for name, found in both.items()
    }


def table(run: Numbers) -> list[str]:
    """Returns the run as a Markdown table."""
    rows = ["| figure | planned | measured | ratio |", "|---|---|---|---|"]
    spans = {"caches": "caches of all rows", "memory": "cache, activations and logits of a row alone"}
    for name, found in run.items():
        for key, words in spans.items():
            if key in found:
                low, high = found[key]
                rows.append(f"| {name}, {words} | | | {low:.3f} ... {high:.3f} |")
        for part, one in found["seconds"].items():
            told, ratios = (
                " and ".join(map(form.format, one[key])) for form, key in (("{}", "planned"), ("{:.2f}", "ratio"))
            )
            rows.append(f"| {name}, seconds, {part} | {told} | {one['measured']} | {ratios} |")
    return rows


def main() -> None:
    """Measures and prints; with --write keeps the run, and writes it and what `--plan` prints into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep the run in results/{RESULT} and {PAGE.name}")
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    content = run()
    print("\n".join(table(content)))
    if asked.write:
        keep(RESULT, content)
        rewrite("run plan table", table(content))
        rewrite("eval example", printed(["eval", "--config", "eval/quick.yaml", "--plan"], THREADS))


if __name__ == "__main__":
    main()
