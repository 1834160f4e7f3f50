"""What the figures of a cell are, told by their names: one is the column's quality, others are of parts, others count.

A number alone in a name (`layer 3`, `exact at 0.25`) makes it a figure of a part; names that differ in the last number only
are one map. Whole numbers are counts. `kl_low` and `kl_high` are the interval of `kl`; `low` and `high` the quality's.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

Figures = Mapping[str, Any]

LM_EVAL = ("accuracy", "exact_match", "word_perplexity", "f1", "mcc", "bleu", "rouge1")  # its most usual metrics
QUALITIES = (
    "exact",
    "perplexity",
    "agreement",
    "distance",
    *LM_EVAL,
)  # the first of these that a cell has is its quality
# Words of names: less is better, or more.
LESS = {"perplexity", "kl", "divergence", "nats", "error", "loss", "distance", "excess", "bits", "brier", "ter"}
MORE = {"exact", "agreement", "accuracy", "probability", "kept", "match", "f1", "mcc", "bleu", "chrf", "likelihood"}
MORE |= {"rouge1", "rouge2", "rougel", "rougelsum"}
ENDS = ("low", "high")
PART = re.compile(r"(?<![A-Za-z0-9.])\d+(?:\.\d+)?(?![A-Za-z0-9.])")
PLACE = "#"  # where a map's name has its number


def scalars(cells: Iterable[Figures]) -> list[str]:
    """Names of the figures that a column's cells have as a whole: its quality first, the others by name."""
    found = {name for figures in cells for name in alone(figures)}
    return sorted(found, key=lambda name: (QUALITIES.index(name) if name in QUALITIES else len(QUALITIES), name))


def alone(figures: Figures) -> list[str]:
    """Names of the figures of one cell that are neither of a part nor a count nor an interval's end."""
    parts = {name for found in maps(figures).values() for name in found.values()}
    return [name for name, value in figures.items() if type(value) is float and name not in parts and not is_end(name)]


def is_end(name: str) -> bool:
    """Whether it is the name of an interval's end, of a part's (`low at 0.5`) as well."""
    words = re.split(r"[ _]", name)
    return words[0] in ENDS or words[-1] in ENDS


def maps(figures: Figures) -> dict[str, dict[float, str]]:
    """Names of figures by part, of every map (`layer #`) that has at least two."""
    found: dict[str, dict[float, str]] = {}
    for name, value in figures.items():
        numbers = list(PART.finditer(name))
        if numbers and type(value) is float and not is_end(name):
            start, end = numbers[-1].span()
            found.setdefault(name[:start] + PLACE + name[end:], {})[float(name[start:end])] = name
    return {name: dict(sorted(parts.items())) for name, parts in sorted(found.items()) if len(parts) > 1}


def interval(figures: Figures, name: str) -> tuple[float, float] | None:
    """The interval of the figure `name`, where the cell has one."""
    of_quality = name == next(iter(scalars([figures])), None)
    for ends in ([f"{name}_{end}" for end in ENDS], ENDS if of_quality else ()):
        if ends and all(end in figures for end in ends):
            low, high = (float(figures[end]) for end in ends)
            return low, high
    return None


def less_is_better(name: str) -> bool | None:
    """Whether a lower figure is the better one; None where its name does not tell."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return True if words & LESS else False if words & MORE else None


def spoken(name: str) -> str:
    """A figure's name in words."""
    return name.replace("_", " ")


def number(value: float) -> str:
    """A figure with as many decimals as tell its size: three below 10, fewer above, a power of ten where it is tiny."""
    size = abs(value)
    if size and (size < 5e-4 or size >= 1e6):
        return f"{value:.1e}"
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 1000 else f"{value:.0f}"
