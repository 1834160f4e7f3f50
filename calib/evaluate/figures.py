"""Classifies the figures of a cell by their names: the column's quality, figures of parts, counts, ends of intervals.

A separate number in a name (`layer 3`, `exact at 0.25`) makes it a figure of a part; names that differ only in their last number
form one map. Integer figures are counts. `kl_low` and `kl_high` are the interval of `kl`; `low` and `high` are the quality's.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

Figures = Mapping[str, Any]

LM_EVAL = ("accuracy", "exact_match", "word_perplexity", "f1", "mcc", "bleu", "rouge1")  # lm-eval's most usual metrics
QUALITIES = (
    "exact",
    "perplexity",
    "agreement",
    "distance",
    *LM_EVAL,
)  # the first of these that a cell has is its quality
# Words in figures' names for which lower is better, and for which higher is better.
LESS = {"perplexity", "kl", "divergence", "nats", "error", "loss", "distance", "excess", "bits", "brier", "ter"}
MORE = {"exact", "agreement", "accuracy", "probability", "kept", "match", "f1", "mcc", "bleu", "chrf", "likelihood"}
MORE |= {"rouge1", "rouge2", "rougel", "rougelsum"}
ENDS = ("low", "high")
PART = re.compile(r"(?<![A-Za-z0-9.])\d+(?:\.\d+)?(?![A-Za-z0-9.])")
PLACE = "#"  # stands for the number in a map's name


def scalars(cells: Iterable[Figures]) -> list[str]:
    """Names of the figures of a column's cells that describe the whole cell: the quality first, the others alphabetically."""
    found = {name for figures in cells for name in alone(figures)}
    return sorted(found, key=lambda name: (QUALITIES.index(name) if name in QUALITIES else len(QUALITIES), name))


def alone(figures: Figures) -> list[str]:
    """Names of the figures of one cell that are neither figures of a part, nor counts, nor ends of intervals."""
    parts = {name for found in maps(figures).values() for name in found.values()}
    return [name for name, value in figures.items() if type(value) is float and name not in parts and not is_end(name)]


def is_end(name: str) -> bool:
    """Whether `name` is the name of an end of an interval, also of a part's interval (`low at 0.5`)."""
    words = re.split(r"[ _]", name)
    return words[0] in ENDS or words[-1] in ENDS


def maps(figures: Figures) -> dict[str, dict[float, str]]:
    """Returns, for every map (`layer #`) with at least two parts, the names of its figures by the part's number."""
    found: dict[str, dict[float, str]] = {}
    for name, value in figures.items():
        numbers = list(PART.finditer(name))
        if numbers and type(value) is float and not is_end(name):
            start, end = numbers[-1].span()
            found.setdefault(name[:start] + PLACE + name[end:], {})[float(name[start:end])] = name
    return {name: dict(sorted(parts.items())) for name, parts in sorted(found.items()) if len(parts) > 1}


def interval(figures: Figures, name: str) -> tuple[float, float] | None:
    """Returns the interval of the figure `name`, or None if the cell has none."""
    of_quality = name == next(iter(scalars([figures])), None)
    for ends in ([f"{name}_{end}" for end in ENDS], ENDS if of_quality else ()):
        if ends and all(end in figures for end in ends):
            low, high = (float(figures[end]) for end in ends)
            return low, high
    return None


def less_is_better(name: str) -> bool | None:
    """Whether a lower value of the figure `name` is better; None if the name does not say."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return True if words & LESS else False if words & MORE else None


def spoken(name: str) -> str:
    """A figure's name in words."""
    return name.replace("_", " ")


def number(value: float) -> str:
    """Formats a figure: three decimals below 10, fewer above, and with an exponent if it is tiny or at least 1e6."""
    size = abs(value)
    if size and (size < 5e-4 or size >= 1e6):
        return f"{value:.1e}"
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 1000 else f"{value:.0f}"
