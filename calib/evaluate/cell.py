"""One cell of the table: one row on one column, its figures and the size of its cache."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from calib.evaluate.cache_size import sizes
from calib.evaluate.entries import Entry, Given
from calib.evaluate.tasks import Column
from calib.runtime.files.canonical_json import plain, sha256

Result = dict[str, Any]


def cell_key(
    base: Mapping[str, Any],
    method: str,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    artifact_hash: str | None,
) -> str:
    """A cell's key, of a run or of what a file says of one: `base` as in `Cell.key`, `settings` of its column."""
    own = {"method": method, "options": options, "column": settings, "artifact": artifact_hash}
    return sha256(plain({**base, **own}, "cell"))


@dataclass(frozen=True)
class Cell:
    """A row and a column that it serves.

    Attributes:
        entry: the row.
        column: the column.
        artifact_hash: SHA-256 of the artifact's file where the row uses it, else None.
    """

    entry: Entry
    column: Column
    artifact_hash: str | None

    @property
    def tokens(self) -> float:
        """Tokens that go through the model."""
        return self.column.rows * self.column.length

    def options(self) -> dict[str, Any]:
        """All options of the row on this column, those left at their default included, as plain JSON."""
        return self.entry.all_options(self.column.title)

    def key(self, base: dict[str, Any]) -> str:
        """SHA-256 of everything the figures depend on; `base` is what all cells of a run share."""
        return cell_key(base, self.entry.method, self.options(), self.column.settings, self.artifact_hash)

    def measure(self, given: Given, advance: Callable[[float], None]) -> Result:
        """Has the batches answered one after another; calls `advance(tokens)` after each."""
        advance(0)  # the bar names the cell while its data are made
        batches = self.column.batches()
        parts, cache_sizes, start = [], [], time.perf_counter()
        for part, size in self.entry.answers(given, self.column, batches):
            parts.append(part)
            cache_sizes.append(size)
            advance(self.tokens / len(batches))
        return {
            "figures": self.column.summary(parts),
            "sizes": {**sizes(cache_sizes), "paper_counting": self.entry.counted_bits(given, self.column)},
            "seconds": round(time.perf_counter() - start, 3),
        }
