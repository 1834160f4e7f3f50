"""Checks results that were read from a file: of a finished cell, or of an earlier run."""

from collections.abc import Mapping
from typing import Any

from calib.evaluate.cache_size import CacheSize
from calib.evaluate.cache_size import sizes as sizes_of
from calib.evaluate.run_file import is_number, is_sizes
from calib.evaluate.tasks import Column

PARTS = ("figures", "sizes", "seconds")  # entries of a result
OTHERS = {"by_kind": "no mapping of numbers", "encoded": "neither true nor false"}
KNOWN = ("bits_per_value", "measured_bytes", "host_bytes")  # sizes that are always known; others may be None


def incomplete(column: Column, result: Mapping[str, Any]) -> str | None:
    """Returns what a result of `column` lacks that this release's reports need, in words; None if it is complete."""
    for part in ("figures", "sizes"):
        if not isinstance(result.get(part), dict):
            return f"it has no {part}"
    if not is_number(result.get("seconds")):
        return "its seconds are no number"
    return wrong_sizes(result["sizes"]) or wrong_figures(column, result["figures"])


def wrong_sizes(sizes: Mapping[str, Any]) -> str | None:
    """Returns which size is missing or has a wrong type, in words; None if all are right."""
    wanted = (*sizes_of([CacheSize(0, 0.0)]), "paper_counting")
    if missing := [name for name in wanted if name not in sizes]:
        return f"its sizes have no {', '.join(missing)}"
    for name in wanted:
        if not size_fits(name, sizes[name]):
            return f"its sizes.{name} is {OTHERS.get(name, 'no number')}"
    if (sizes["dynamic_bytes"] is None) != (sizes["share_of_dynamic"] is None):
        return "its sizes have dynamic_bytes or share_of_dynamic alone"
    return None


def size_fits(name: str, value: object) -> bool:
    """Whether `value` has the type that the size `name` has in `cache_size.sizes`."""
    if name == "by_kind":
        return is_sizes(value)
    if name == "encoded":
        return isinstance(value, bool)
    return is_number(value) or (value is None and name not in KNOWN)


def wrong_figures(column: Column, figures: Mapping[str, Any]) -> str | None:
    """Returns why the column cannot put these figures into words; None if it can."""
    if wrong := [name for name, value in figures.items() if not is_number(value)]:
        return f"its figures.{wrong[0]} is no number"
    try:
        column.words(figures)
        column.brief(figures)
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        return f"its figures are incomplete ({error})"
    return None
