"""A proportion of independent cases and its confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964  # normal quantile of a 95 % interval


@dataclass(frozen=True)
class Proportion:
    """`right` of `cases` independent cases."""

    right: int
    cases: int

    @property
    def share(self) -> float:
        """The share of right cases, 0 to 1."""
        return self.right / self.cases

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson (1927), which stays within 0 to 1 and has a width above 0 even for shares of 0 and 1."""
        n, p = self.cases, self.share
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_dict(self) -> dict[str, float | int]:
        """Share, ends of the interval and number of cases, for JSON."""
        low, high = self.interval
        return {"exact": self.share, "low": low, "high": high, "cases": self.cases}


def exact_at(parts: Sequence[Sequence[str]], right: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Returns the share of right answers of every part, as {"exact at depth 0.25": ...}.

    `parts` has the part's name of each answer of each row, `right` whether that answer is right.
    """
    by_part: dict[str, list[bool]] = {}
    for names, answers in zip(parts, right, strict=True):
        for name, answer in zip(names, answers, strict=False):  # a row without names counts in no part
            by_part.setdefault(name, []).append(answer)
    return {f"exact at {name}": sum(by_part[name]) / len(by_part[name]) for name in sorted(by_part)}
