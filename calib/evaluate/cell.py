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
    """Returns a cell's key (SHA-256), for a cell of this run or of a results file.

    Args:
        base: what all cells of the run depend on, as in `Cell.key`.
        method: name of the method.
        options: all its options.
        settings: settings of the column.
        artifact_hash: SHA-256 of the artifact's file if the cell uses it, else None.
    """
    own = {"method": method, "options": options, "column": settings, "artifact": artifact_hash}
    return sha256(plain({**base, **own}, "cell"))


@dataclass(frozen=True)
class Cell:
    """A row (entry) of the table, and a column that it can be measured on.

    Attributes:
        entry: the row.
        column: the column.
        artifact_hash: SHA-256 of the artifact's file if the row uses it, else None.
    """

    entry: Entry
    column: Column
    artifact_hash: str | None

    @property
    def tokens(self) -> float:
        """Number of tokens that go through the model."""
        return self.column.rows * self.column.length

    def options(self) -> dict[str, Any]:
        """Returns all options of the row on this column as plain JSON, including those at their default."""
        return self.entry.all_options(self.column.title)

    def key(self, base: dict[str, Any]) -> str:
        """Returns the SHA-256 of everything that the figures depend on; `base` is what all cells of a run depend on."""
        return cell_key(base, self.entry.method, self.options(), self.column.settings, self.artifact_hash)

    def measure(self, given: Given, advance: Callable[[float], None]) -> Result:
        """Answers the column's batches one after another, and returns the cell's figures, sizes and seconds.

        `advance(tokens)` is called after each batch, and once with 0 before the data are made.
        """
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
