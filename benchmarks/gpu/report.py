"""The table of targets, and the JSON file of a run."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.supervise import NOT_STARTED, STOPPED
from benchmarks.gpu.targets import TARGETS, Target

NOT_YET = "not yet measured"
# The wording of reasons in older files.
REWORDED = {"stopped: it took longer than it may": STOPPED, "not begun: the time was over": NOT_STARTED}
RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "triton", "transformers", "safetensors", "optimum-quanto")

Records = Sequence[Mapping[str, Any]]


def rows(records: Records) -> list[dict[str, Any]]:
    """Returns every target with its measured low, median and high and the limit reached, or the reason why there is none."""
    by_name = {record["name"]: record for record in records}
    return [_row(target, by_name.get(target.measurement)) for target in TARGETS]


def newest(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns for every measurement the last record with figures, or else its last record; `runs` are in order of time."""
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
    """Returns the table in Markdown, with `not yet measured` for targets without a record."""
    return _table({"measured": records})


def compared(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table with a column for every GPU, with its newest measurements; `runs` are in order of time."""
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
    """Returns the measured figures and the limit that they reach, or the reason, as text."""
    if not row["measured"]:
        return REWORDED.get(row["reason"], str(row["reason"])).replace("|", "/")
    low, median, high = (target.shown(row["measured"][name]) for name in ("low", "median", "high"))
    return f"{median if low == high else f'{median} ({low} ... {high})'}, {row['reached']}"


def plain(records: Records) -> str:
    """Returns the table as plain text in columns."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown(records).splitlines()]
    del cells[1]
    widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def device_of(index: int = 0) -> dict[str, Any]:
    """Returns the properties of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, CUDA and the packages that affect figures."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


class Run:
    """The file of a run, rewritten after every record, so that an interrupted run keeps its records.

    `file` is `gpu-NAME-WHEN.json` in `folder`, which is created. Raises OSError if it cannot be written.
    """

    def __init__(self, device: Mapping[str, Any], folder: Path) -> None:
        self.device, self.tests, self.records = dict(device), dict[str, Any](), list[Mapping[str, Any]]()
        self.start, self.when = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        name = "-".join(["gpu", *self.device["name"].lower().split(), self.when.replace(":", "").replace("-", "")])
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{name}.json"
        self.keep()

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds the record of one measurement and writes the file."""
        self.records.append(record)
        self.keep()

    def keep(self) -> None:
        """Writes the file atomically."""
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
    """Returns the folder of a run's file: `asked`, else that of the variable OUT, else benchmarks/results."""
    return asked or Path(os.environ.get("OUT") or RESULTS)
