"""Reads and checks the `results.json` of an earlier run, so that reports find every entry that they need."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calib.errors import UsageError
from calib.evaluate.figures import spoken
from calib.runtime.files import canonical_json
from calib.runtime.messages.printable import printable

FORMAT = 1
Run = Mapping[str, Any]


def read_run(name: str) -> dict[str, Any]:
    """Returns the run in the file `name`; raises UsageError if it is missing or not a run of `calib eval`."""
    return read_results(name, "calib eval", check)


def read_results(name: str, command: str, check: Callable[[object], None]) -> dict[str, Any]:
    """Returns the results that `command` wrote into the file `name`; `check` raises ValueError for other content.

    Raises UsageError if the file is missing, cannot be read or has other content.
    """
    path = Path(name)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"{name} {found}, expected a results.json of `{command}`")
    try:
        content: dict[str, Any] = canonical_json.loads(path.read_bytes())
        check(content)
    except OSError as error:
        raise UsageError(f"{name} cannot be read ({error.strerror}); give another file") from error
    except ValueError as error:
        raise UsageError(f"{name} is no run of `{command}` ({error}); give the results.json it wrote") from error
    return content


def check(content: object) -> None:
    """Raises ValueError that names the first missing or wrong entry of a run."""
    require(isinstance(content, dict), "it is no mapping")
    assert isinstance(content, dict)
    require("format" in content, "it has no format")
    require(content["format"] == FORMAT, f"its format is {printable(content['format'])}, this release reads {FORMAT}")
    for key in ("config", "model", "versions"):
        entry(content, key, dict, key)
    for key in ("columns", "cells"):
        entry(content, key, list, key)
    for position, column in enumerate(content["columns"]):
        for key in ("title", "measures"):
            entry(column, key, str, f"columns[{position}].{key}")
    titles = {column["title"] for column in content["columns"]}
    for position, cell in enumerate(content["cells"]):
        check_cell(cell, titles, f"cells[{position}]")


def check_cell(cell: object, titles: set[str], where: str) -> None:
    """Raises ValueError unless a cell belongs to one of the columns `titles` and has an error, or figures and sizes."""
    for key in ("name", "group", "method", "column"):
        entry(cell, key, str, f"{where}.{key}")
    assert isinstance(cell, dict)
    entry(cell, "options", dict, f"{where}.options")
    require(cell["column"] in titles, f"{where}.column is {printable(cell['column'])}, and there is no such column")
    if "error" in cell:
        entry(cell, "error", str, f"{where}.error")
        return
    for key in ("figures", "sizes"):
        entry(cell, key, dict, f"{where}.{key}")
    for name, value in cell["figures"].items():
        require(is_number(value), f"{where}.figures.{name} is no number")
    for name in ("bits_per_value", "measured_bytes", "host_bytes"):
        require(is_number(cell["sizes"].get(name)), f"{where}.sizes.{name} is no number")
    require(optional(cell["sizes"].get("paper_counting"), is_number), f"{where}.sizes.paper_counting is no number")
    kinds = cell["sizes"].get("by_kind")  # runs of earlier releases have none
    require(optional(kinds, is_sizes), f"{where}.sizes.by_kind has something else than numbers")
    check_source(cell, where)


def check_source(cell: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if a cell was taken over from another run but lacks that run's hash or machine."""
    if "reused" in cell:
        entry(cell["reused"], "results_sha256", str, f"{where}.reused.results_sha256")
        entry(cell["reused"], "machine", dict, f"{where}.reused.machine")


def entry(content: object, key: str, kind: type, where: str) -> None:
    """Raises ValueError unless `content[key]` exists and has the type `kind`."""
    require(isinstance(content, dict) and isinstance(content.get(key), kind), f"it has no {where}")


def require(holds: bool, otherwise: str) -> None:
    """Raises ValueError with the text `otherwise` unless the condition `holds`."""
    if not holds:
        raise ValueError(otherwise)


def optional(value: object, fits: Callable[[object], bool]) -> bool:
    """Whether `value` is None or passes the test `fits`."""
    return value is None or fits(value)


def is_number(value: object) -> bool:
    """Whether `value` is a number (no bool) of a size that charts can show: 0, or between 1e-150 and 1e150 in absolute value, so
    that ratios of two such numbers are finite as well."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and (value == 0 or 1e-150 < abs(value) < 1e150)


def is_sizes(value: object) -> bool:
    """Whether `value` is a mapping of numbers."""
    return isinstance(value, dict) and all(map(is_number, value.values()))


@dataclass(frozen=True)
class Row:
    """A row of a run: the heading of its group, its name, and its cells by the column's title."""

    group: str
    name: str
    cells: Mapping[str, Mapping[str, Any]]


def rows(run: Run) -> list[Row]:
    """The rows of a run, in order."""
    found: dict[str, Row] = {}
    for cell in run["cells"]:
        row = found.setdefault(cell["name"], Row(cell["group"], cell["name"], {}))
        found[row.name] = replace(row, cells={**row.cells, cell["column"]: cell})
    return list(found.values())


def reused(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each earlier run from which some of `cells` were taken over: how many, which run, which machine."""
    found: dict[tuple[str, str], int] = {}
    for source in (cell["reused"] for cell in cells if "reused" in cell):
        machine = ", ".join(f"{spoken(name)} {value}" for name, value in source["machine"].items())
        found[source["results_sha256"], machine] = found.get((source["results_sha256"], machine), 0) + 1
    return [
        f"{count} cells were taken over from an earlier run and not measured again. SHA-256 of its results.json: {digest}; its "
        f"machine: {machine or 'not recorded'}."
        for (digest, machine), count in found.items()
    ]


def titles(run: Run) -> list[str]:
    """Returns the titles of the run's columns, in order."""
    return [column["title"] for column in run["columns"]]
