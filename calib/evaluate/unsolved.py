"""Finds columns that say nothing about the methods, because the full cache does not solve them either.

A column is solved if the 95 % interval of the full cache's exact answers lies above the share that guessing gives (0 unless the
column has a `chance`). In an unsolved column a compressed cache has no right answers to lose, so its cells do not distinguish
methods.
"""

from typing import Any

from calib.evaluate.figures import number
from calib.evaluate.run_file import Run, is_number

FULL = ("full", "peer dynamic")  # methods that keep all tokens exact
MARK = "†"  # appended to a column's title


def unsolved(run: Run) -> dict[str, str]:
    """Returns the reason in words for every unsolved column, by title; empty for a run without a row of the full cache."""
    chances = {column["title"]: column.get("chance", 0.0) for column in run["columns"]}
    found: dict[str, str] = {}
    for cell in run["cells"]:
        figures = cell.get("figures", {})
        if cell["method"] in FULL and "exact" in figures and "low" in figures:
            chance = chances[cell["column"]]
            if figures["low"] <= (chance if is_number(chance) else 0.0):
                found.setdefault(cell["column"], reason(cell, chance))
    return found


def reason(cell: dict[str, Any], chance: float) -> str:
    """Returns "full has 0.040 [0.011, 0.135] exact answers, and guessing gives 0.050"."""
    figures, guess = cell["figures"], f", and guessing gives {number(chance)}" if chance else ""
    ends = "" if "high" not in figures else f" [{number(figures['low'])}, {number(figures['high'])}]"
    return f"{cell['name']} has {number(figures['exact'])}{ends} exact answers{guess}"


def note(title: str, why: str) -> str:
    """Returns the line below a table on an unsolved column."""
    return f"{MARK} {title} does not distinguish the methods: {why}. Give the model a task that it solves with the full cache."


def marked(heading: str, columns: dict[str, str], title: str) -> str:
    """Returns a column's heading, with the mark if `columns` has its title."""
    return f"{heading} {MARK}" if title in columns else heading
