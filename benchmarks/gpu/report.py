"""The table of targets, for people; and one JSON file for a run."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.targets import TARGETS, Target

NOT_YET = "not yet measured"
RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "triton", "transformers", "safetensors", "optimum-quanto")

Records = Sequence[Mapping[str, Any]]


def rows(records: Records) -> list[dict[str, Any]]:
    """Every target with what was measured: low, median, high and which of the limits that reaches; or a reason."""
    by_name = {record["name"]: record for record in records}
    return [_row(target, by_name.get(target.measurement)) for target in TARGETS]


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
    lines = ["| target | accept | stretch | ideal | measured | |", "|---|---|---|---|---|---|"]
    for target, row in zip(TARGETS, rows(records), strict=True):
        sign = ">=" if target.more else "<="
        limits = [
            f"{sign} {target.shown(target.accept)}",
            f"{sign} {target.shown(target.stretch)}",
            target.shown(target.ideal),
        ]
        if row["measured"]:
            low, median, high = (target.shown(row["measured"][name]) for name in ("low", "median", "high"))
            found = [median if low == high else f"{median} ({low} ... {high})", row["reached"]]
        else:
            found = [row["reason"].replace("|", "/"), ""]
        lines.append("| " + " | ".join([target.name, *limits, *found]) + " |")
    return "\n".join(lines) + "\n"


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


def run_of(device: Mapping[str, Any], tests: Mapping[str, Any], records: Records, seconds: float) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "device": dict(device),
        "versions": versions(),
        "when": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "tests": dict(tests),
        "targets": rows(records),
        "measurements": list(records),
    }


def keep(run: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a run to `gpu-NAME-WHEN.json` in `folder`."""
    name = "-".join(["gpu", *run["device"]["name"].lower().split(), run["when"].replace(":", "").replace("-", "")])
    file = folder / f"{name}.json"
    folder.mkdir(exist_ok=True)
    file.write_text(json.dumps(run, indent=1) + "\n")
    return file
