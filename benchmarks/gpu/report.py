"""The table of targets, for people; and one JSON file for a run."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.supervise import STOPPED
from benchmarks.gpu.targets import TARGETS, Target

NOT_YET = "not yet measured"
REWORDED = {"stopped: it took longer than it may": STOPPED}  # of files that are older than the word
RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "triton", "transformers", "safetensors", "optimum-quanto")

Records = Sequence[Mapping[str, Any]]


def rows(records: Records) -> list[dict[str, Any]]:
    """Every target with what was measured: low, median, high and which of the limits that reaches; or a reason."""
    by_name = {record["name"]: record for record in records}
    return [_row(target, by_name.get(target.measurement)) for target in TARGETS]


def newest(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of every measurement the last record that has figures, of runs in the order of time; of one without, its last reason."""
    found: dict[str, Mapping[str, Any]] = {}
    for record in (record for run in runs for record in run["measurements"]):
        if "figures" in record or "figures" not in found.get(record["name"], {}):
            found[record["name"]] = record
    return list(found.values())


def _row(target: Target, record: Mapping[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": target.name,
        "better": "more" if target.more else "less",
        "unit": target.unit,
        "accept": target.accept,
        "stretch": target.stretch,
        "ideal": target.ideal,
    }
    if record is None:
        return row | {"measured": None, "reason": NOT_YET}
    found = record.get("figures", {}).get(target.figure)
    if found is None:
        return row | {"measured": None, "reason": record.get("reason", "no such figure in its run")}
    low, median, high = found
    return row | {"measured": {"low": low, "median": median, "high": high}, "reached": target.reached(median)}


def markdown(records: Records) -> str:
    """The table; `not yet measured` where there is no record."""
    return _table({"measured": records})


def compared(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table with the newest measurements of every GPU in a column of its own, of runs in the order of time."""
    names = dict.fromkeys(run["device"]["name"] for run in runs)
    return _table({name: newest([run for run in runs if run["device"]["name"] == name]) for name in names})


def _table(columns: Mapping[str, Records]) -> str:
    heads = ["target", "accept", "stretch", "ideal", *columns]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    measured = [rows(records) for records in columns.values()]
    for target, *found in zip(TARGETS, *measured, strict=True):
        sign = ">=" if target.more else "<="
        limits = [
            f"{sign} {target.shown(target.accept)}",
            f"{sign} {target.shown(target.stretch)}",
            target.shown(target.ideal),
        ]
        lines.append("| " + " | ".join([target.name, *limits, *(_shown(target, row) for row in found)]) + " |")
    return "\n".join(lines) + "\n"


def _shown(target: Target, row: Mapping[str, Any]) -> str:
    """What was measured, and which limit that reaches."""
    if not row["measured"]:
        return REWORDED.get(row["reason"], str(row["reason"])).replace("|", "/")
    low, median, high = (target.shown(row["measured"][name]) for name in ("low", "median", "high"))
    return f"{median if low == high else f'{median} ({low} ... {high})'}, {row['reached']}"


def plain(records: Records) -> str:
    """The same in columns."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown(records).splitlines()]
    del cells[1]
    widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def device_of(index: int = 0) -> dict[str, Any]:
    """The GPU that was measured."""
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def versions() -> dict[str, str | None]:
    """Of everything that has a part in a figure."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


class Run:
    """What is kept of a run: one file, written anew after everything that is added, so that a run cut short has kept what it found.

    `file` is `gpu-NAME-WHEN.json` in `folder`, which is made. Raises OSError where it cannot be written.
    """

    def __init__(self, device: Mapping[str, Any], folder: Path) -> None:
        self.device, self.tests, self.records = dict(device), dict[str, Any](), list[Mapping[str, Any]]()
        self.start, self.when = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        name = "-".join(["gpu", *self.device["name"].lower().split(), self.when.replace(":", "").replace("-", "")])
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{name}.json"
        self.keep()

    def add(self, record: Mapping[str, Any]) -> None:
        """One measurement."""
        self.records.append(record)
        self.keep()

    def keep(self) -> None:
        """Writes what there is; a reader finds the file whole at any moment."""
        run = {
            "device": self.device,
            "versions": versions(),
            "when": self.when,
            "seconds": round(time.monotonic() - self.start, 1),
            "tests": self.tests,
            "targets": rows(self.records),
            "measurements": self.records,
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(run, indent=1) + "\n")
        new.replace(self.file)


def folder_of(asked: Path | None) -> Path:
    """Where a run is kept: the folder asked for, that of the variable OUT, or the repository's own results."""
    return asked or Path(os.environ.get("OUT") or RESULTS)
