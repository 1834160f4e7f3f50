"""A Weights & Biases sweep over what ZipCache and MiKV keep at how many bits: exact answers against true bits.

python examples/wandb_sweep.py                      # logged in: a sweep of W&B's; else a loop over the grid, run by run, offline
wandb sync wandb/offline-run-*                      # uploads what a loop has left
"""

import argparse
import itertools
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from calib.evaluate.cell_files import CellFiles
from calib.evaluate.evaluation import measure, prepare
from calib.evaluate.request import Request
from calib.loggers import PROJECT, logged_in, run_logger


def row(method: str, ratio: float, bits: int) -> dict[str, Any]:
    """The sweep's parameters as options of the method."""
    if method == "zipcache":
        return {"method": method, "tiers": [[bits, ratio], [2, round(1 - ratio, 6)]]}
    return {"method": method, "ratio": ratio, "important": bits, "retained": 2}


def quality(settings: dict[str, Any], asked: argparse.Namespace) -> dict[str, float]:
    """What one point of the sweep is worth and its size; finished points are read from the output folder."""
    content = {
        "model": asked.model,
        "artifact": asked.artifact,
        "methods": [row(**settings)],
        "tasks": [{"task": "retrieval", "lines": [40], "cases": asked.cases}],
    }
    evaluation, files = prepare(Request.of(content, "sweep")), CellFiles(asked.output / "cells")
    (cell,) = evaluation.cells
    key = evaluation.key(cell)
    result = files.read(key, cell.column) or measure(evaluation, [cell], files, lambda *_: None)[key]
    if "error" in result:
        raise RuntimeError(result["error"])
    return {**result["figures"], "bits_per_value": result["sizes"]["bits_per_value"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="artifacts/tiny-llama", help="a folder or a hub name")
    parser.add_argument("--artifact", help="what `calib fit` wrote for the model")
    parser.add_argument("--sweep", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--cases", type=int, default=50, help="questions of each point")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"))
    asked = parser.parse_args()
    sweep = yaml.safe_load(asked.sweep.read_text())
    asked.output.mkdir(parents=True, exist_ok=True)
    if find_spec("wandb") and os.environ.get("WANDB_MODE", "online") == "online" and logged_in():
        import wandb

        def run() -> None:
            with wandb.init(dir=asked.output) as logged:
                logged.log(quality(dict(logged.config), asked))

        wandb.agent(wandb.sweep(sweep, project=PROJECT), run, project=PROJECT)
        return
    names = list(sweep["parameters"])
    for values in itertools.product(*(sweep["parameters"][name]["values"] for name in names)):
        settings = dict(zip(names, values, strict=True))
        logger = run_logger(asked.output, "-".join(map(str, values)))  # W&B offline, or CSV files without it
        logger.log_hyperparams(settings)
        logger.log_metrics(found := quality(settings, asked))
        logger.close()
        print(f"{settings}: {found['exact']:.2f} exact at {found['bits_per_value']:.2f} bits")


if __name__ == "__main__":
    main()
