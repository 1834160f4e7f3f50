"""Options of the contract's tests: `--contract-report FILE` writes the table of cells as Markdown when the tests are done.

`--contract-cells FILE` also keeps the cells as JSON; a later run of some cells (`-k`) replaces these alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from contract.report import CellReport, report

REPORTS: list[CellReport] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--contract-report", metavar="FILE", help="write the contract's table of cells to FILE (Markdown)")
    parser.addoption("--contract-cells", metavar="FILE", help="keep the cells in FILE (JSON), of earlier runs as well")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the result of a cell. Workers of pytest-xdist send their reports, with properties, to the process that writes the
    table.
    """
    properties: dict[str, Any] = dict(report.user_properties)
    if "cell" in properties and (report.when == "call" or report.failed):
        REPORTS.append(CellReport(report.passed, properties["cell"], properties.get("result")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    file, kept = (session.config.getoption(f"--contract-{name}", default=None) for name in ("report", "cells"))
    if hasattr(session.config, "workerinput"):
        return
    cells = with_earlier(REPORTS, Path(kept)) if kept else REPORTS
    if file:
        Path(file).write_text(report(cells))


def with_earlier(cells: list[CellReport], file: Path) -> list[CellReport]:
    """Return `cells` and those of `file` that are not among them, and write both to `file`."""
    earlier = [CellReport(**cell) for cell in json.loads(file.read_text())] if file.exists() else []
    found = {json.dumps(one.cell, sort_keys=True): one for one in [*earlier, *cells]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([vars(one) for one in found.values()], indent=1) + "\n")
    return list(found.values())
