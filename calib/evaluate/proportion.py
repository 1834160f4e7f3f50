"""How many of how many, and what that says about the share it was drawn from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964  # of 95 %


@dataclass(frozen=True)
class Proportion:
    """`right` of `cases` independent cases."""

    right: int
    cases: int

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.right / self.cases

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson (1927), which stays inside 0 to 1 and is not empty at either end."""
        n, p = self.cases, self.share
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        low, high = self.interval
        return {"exact": self.share, "low": low, "high": high, "cases": self.cases}


def exact_at(parts: Sequence[Sequence[str]], right: Sequence[Sequence[bool]]) -> dict[str, float]:
    """The share of right answers of every part, as {"exact at depth 0.25": ...}; `parts` names those of a row's answers."""
    by_part: dict[str, list[bool]] = {}
    for names, answers in zip(parts, right, strict=True):
        for name, answer in zip(names, answers, strict=False):  # no names, no figures
            by_part.setdefault(name, []).append(answer)
    return {f"exact at {name}": sum(by_part[name]) / len(by_part[name]) for name in sorted(by_part)}
