"""Turns lm-eval's metrics into figures of a cell: `acc,none` and `acc_stderr,none` become `accuracy` and its interval."""

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

from calib.errors import RunError
from calib.evaluate.figures import scalars
from calib.evaluate.proportion import Z

SHARES = ("accuracy", "exact")  # prefixes of metrics between 0 and 1, whose intervals are clipped to that range


def spelled(metric: str) -> str:
    """Spell out `acc_norm` as `accuracy_norm`; other names stay as in lm-eval."""
    return re.sub(r"^acc(?![a-z])", "accuracy", metric)


def figures(results: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns the figures of one task's results.

    If a metric has several filters, the first one's figure has no filter name. Intervals are normal 95 % intervals from lm-eval's
    standard error, if there is one: the interval of the quality (`figures.scalars`) is `low` to `high`, others have the figure's
    name as prefix.

    Raises RunError if a metric is not finite, or if there is no metric.
    """
    found: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, value in results.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not is_number(value):
            continue
        name = spelled(metric) if spelled(metric) not in found else f"{spelled(metric)} {kind}"
        if not math.isfinite(value):
            raise RunError(f"lm-eval's {metric} is {value}")
        found[name] = float(value)
        error = results.get(f"{metric}_stderr,{kind}")
        if is_number(error) and math.isfinite(error):
            errors[name] = float(error)
    if not found:
        raise RunError("lm-eval made no metric of the answers")
    quality = scalars([found])[0]
    ends: dict[str, float] = {}
    for name, error in errors.items():
        low, high = found[name] - Z * error, found[name] + Z * error
        if name.startswith(SHARES):
            low, high = max(0.0, low), min(1.0, high)
        before = "" if name == quality else f"{name}_"
        ends |= {f"{before}low": low, f"{before}high": high}
    return {**found, **ends, "cases": int(results.get("sample_len", 0))}


def is_number(value: Any) -> bool:
    """Whether `value` is a real number (also of numpy); lm-eval writes "N/A" for missing ones."""
    return isinstance(value, Real) and not isinstance(value, bool)
