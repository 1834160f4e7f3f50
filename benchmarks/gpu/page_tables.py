"""Markdown tables for the documentation's pages, and the format of their numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]


def measured(row: str, device: str, of: Sequence[Run]) -> str:
    """Returns the median of a target's `row` in the newest run on such a GPU, or "not yet"."""
    for run in reversed(of):
        if device in run["device"]["name"]:
            for target in run["targets"]:
                if target["name"] == row and target["measured"]:
                    return shown(target["measured"]["median"], target["unit"])
    return "not yet"


def shown(value: float, unit: str) -> str:
    """Returns a ratio or a share as text."""
    return f"{value:.0%}" if unit == "%" else f"{value:.2f}{unit}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return (
        "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")
    )


def between(low: float, high: float, unit: str = "", digits: int = 0) -> str:
    """Returns a range as text; one number if both ends look the same. `digits` are those of a share in per cent."""
    first, second = (f"{value:.{digits}%}" if unit == "%" else f"{value:.2f}{unit}" for value in (low, high))
    return first if first == second else f"{first} ... {second}"
