"""docs/results/papers: every figure recomputed from a paper equals its formula's, every figure of our runs that of its file."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from calib.neural_dict.options import DictionaryOptions
from calib.runtime.methods import paper_counting

pytestmark = pytest.mark.arithmetic

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "docs" / "results" / "papers"
PAPERS = {"ZipCache": "zipcache", "MiKV": "mikv", "GEAR": "gear", "CSR": "csr", "SpeCache": "specache"}
KINDS = ("size", "derived", "here", "lm-eval", "judge", "clock", "fit")
OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


@dataclass(frozen=True)
class Table:
    """One table of a page: its cells without backticks, and the last `benchmarks/results` file named before it."""

    page: str
    header: list[str]
    rows: list[list[str]]
    run: Path | None


def text(page: str) -> str:
    return (LEDGER / f"{page}.md").read_text()


@cache
def tables() -> list[Table]:
    found: list[Table] = []
    for page in PAPERS.values():
        run, lines = None, [*text(page).splitlines(), ""]
        start = None
        for position, line in enumerate(lines):
            if line.startswith("|"):
                start = position if start is None else start
            elif start is not None:
                header, _, *rows = [cells(row) for row in lines[start:position]]
                found.append(Table(page, header, rows, run))
                start = None
            named = re.search(r"`(benchmarks/results/\w+\.json)`", line)
            run = ROOT / named[1] if named else run
    return found


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def starting(word: str) -> Iterator[tuple[Table, list[str]]]:
    for table in tables():
        if table.header[0].startswith(word):
            yield from ((table, row) for row in table.rows)


def value(call: str) -> float:
    """Evaluate a call of a function of `paper_counting` or of `mean` on numbers, or arithmetic on such calls."""

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](read(node.left), read(node.right))
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            function = mean if node.func.id == "mean" else getattr(paper_counting, node.func.id)
            return function(*map(read, node.args), **{name.arg: read(name.value) for name in node.keywords if name.arg})
        return ast.literal_eval(node)

    return round(float(read(ast.parse(call, mode="eval").body)), 9)


def rounded(number: float, like: str, how: str = ROUND_HALF_UP) -> Decimal:
    """Round `number` to as many decimals as `like` has."""
    return Decimal(repr(number)).quantize(Decimal(1).scaleb(-len(like.partition(".")[2])), how)


def verdict(paper: str, number: float) -> str:
    if Decimal(paper) == rounded(number, paper):
        return "agrees"
    if Decimal(paper) == rounded(number, paper, ROUND_FLOOR):
        return "agrees, cut off"
    return f"differs by {Decimal(paper) - rounded(number, paper):+}"


def test_every_recomputed_figure_is_what_its_call_gives_and_has_its_verdict() -> None:
    count = 0
    for table, (row, paper, formula, call, found) in starting("recomputed"):
        number = value(call)
        assert formula == f"formula: {rounded(number, paper + '0' if '.' in paper else '.0')}", (table.page, row)
        assert found == verdict(paper, number), (table.page, row)
        count += 1
    assert count == sum(text(page).count("formula: ") for page in PAPERS.values()) > 100


def test_every_figure_of_the_own_model_is_in_its_run() -> None:
    count = 0
    for table, (name, *figures) in starting("own model"):
        assert table.run is not None
        for title, printed in zip(table.header[1:], figures, strict=True):
            found = figures_of(table.run)[name, title]
            quality = found["exact"] if "exact" in found else found["perplexity"]
            assert Decimal("0" + printed) == rounded(quality, printed), (table.page, name, title)
            count += 1
    assert count > 100


@cache
def figures_of(run: Path) -> dict[tuple[str, str], dict[str, float]]:
    return {(cell["name"], cell["column"]): cell["figures"] for cell in json.loads(run.read_text())["cells"]}


def test_every_row_of_another_run_is_in_its_file() -> None:
    found = list(starting("own run: "))
    for table, row in found:
        assert table.run is not None
        names = [table.header[0].removeprefix("own run: "), *table.header[1:]]
        runs = json.loads(table.run.read_text())["rows"]
        assert any(all(map(same, row, (run[name] for name in names))) for run in runs), (table.page, row)
    assert found


def same(printed: str, found: str | float | bool) -> bool:
    if isinstance(found, bool):
        return printed == ("yes" if found else "no")
    if isinstance(found, str):
        return printed == found
    return Decimal("0" + printed) == rounded(found, printed)


def test_cells_add_up() -> None:
    """The README's table has the sums of the pages' `cells` lines."""
    counted: list[list[int]] = []
    for page in PAPERS.values():
        lines = re.findall(r"^- cells: (.*)$", text(page), re.M)
        headings = re.findall(r"^## Table \w+:", text(page), re.M)
        assert len(lines) == len(headings) == len(re.findall(r"^## Table", text(page), re.M))
        kinds = [part.rsplit(" ", 1) for line in lines for part in line.split(", ")]
        assert {kind for kind, _ in kinds} <= set(KINDS)
        of_kind = [sum(int(number) for found, number in kinds if found == kind) for kind in KINDS]
        counted.append([len(lines), *of_kind, sum(of_kind)])
    counted.append([sum(column) for column in zip(*counted, strict=True)])
    header = f"| paper | tables | {' | '.join(KINDS)} | cells |"
    rows = text("README").split(header)[1].strip().splitlines()[1 : len(PAPERS) + 2]
    assert [[cell and int(cell) for cell in cells(row)[1:]] for row in rows] == [
        [number or "" for number in line] for line in counted
    ]
    assert [cells(row)[0] for row in rows] == [*PAPERS, "all"]


@pytest.mark.parametrize("page", ["README", *PAPERS.values()])
def test_what_a_page_names_is_there(page: str) -> None:
    content = text(page)
    for link in re.findall(r"\]\(([^)]+)\)", content):
        assert (LEDGER / link).is_file(), link
    for name in re.findall(r"`((?:docs|benchmarks|calib|tests|configs|runtime)/[\w./-]+)`", content):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"--config ([\w/]+\.yaml)", content):
        assert (ROOT / "configs" / name).is_file(), name
    options = re.findall(r"--model\.dictionary\.(\w+) (\w+)", content)
    known: Sequence[str] = [field.name for field in fields(DictionaryOptions)]
    for name, given in options:
        assert name in known
        DictionaryOptions(**{name: yaml.safe_load(given)})
