"""A row with answers from a file, which another library gave to the same cases in its own environment.

`calib eval --write-cases FILE` writes the cases of the columns that can be written (`calib/evaluate/cases.py`); the program that
answers them writes

    {"format": 1, "name": ..., "options": {...}, "versions": {...}, "weights": {...}, "dtype": ...,
     "columns": [{"title", "settings", "parts": [...], "bytes": [...], "values": [...]}, ...]}

with one part, one number of bytes and one number of key and value elements for each batch. A column that failed has `error` (one
line) instead of these lists. Weights, dtype and settings are copied from the cases.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import RunError, UsageError
from calib.evaluate.cache_size import CacheSize
from calib.evaluate.entries.entry import Entry, Given
from calib.evaluate.tasks import Column
from calib.runtime.files import canonical_json
from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.messages.printable import printable

FORMAT = 1
ENTRIES = {"name": str, "options": dict, "versions": dict, "weights": dict, "dtype": str, "columns": list}
PER_BATCH = ("parts", "bytes", "values")


@dataclass(frozen=True)
class ResultsEntry(Entry):
    """`{results: FILE}`.

    Attributes:
        path: path of the file.
        digest: SHA-256 of the file.
        content: content of the file.
    """

    path: str
    digest: str
    content: Mapping[str, Any]

    @staticmethod
    def of(label: str, group: str, options: Mapping[str, Any], path: object) -> "ResultsEntry":
        """Reads the file; raises UsageError if there are options, or if the file is missing or has no results."""
        if options:
            raise UsageError(f"methods: '{label}': results in a file have no option, got {', '.join(options)}")
        if not isinstance(path, str) or not Path(path).is_file():
            raise UsageError(
                f"methods: '{label}': no file {printable(path)}, expected results of the cases of --write-cases"
            )
        raw = Path(path).read_bytes()
        try:
            content = canonical_json.loads(raw)
            check(content)
        except ValueError as error:
            raise UsageError(f"methods: '{label}': {path} holds no results ({error})") from error
        return ResultsEntry(label, group, {}, path, hashlib.sha256(raw).hexdigest(), content)

    @property
    def method(self) -> str:
        return str(self.content["name"])

    def all_options(self, title: str) -> dict[str, Any]:
        return {**self.content["options"], "versions": self.content["versions"], "sha256": self.digest}

    def serves(self, column: Column) -> bool:
        return any(found["title"] == column.title for found in self.content["columns"])

    def check(self, given: Given, column: Column) -> None:
        """Raises UsageError if the answers are for another model, dtype or other cases than the column's."""
        dtype = dtype_name(given.model.dtype)
        for what, theirs, ours in (
            ("model", self.content["weights"], given.identity["weights"]),
            ("dtype", self.content["dtype"], dtype),
            ("cases", self._of(column)["settings"], column.settings),
        ):
            if theirs != ours:
                raise UsageError(
                    f"methods: '{self.label}': {self.path} answers another {what} on the column '{column.title}' "
                    f"({theirs}, not {ours}); write the cases again with --write-cases and have them answered"
                )

    def answers(self, given: Given, column: Column, batches: Sequence[Any]) -> Iterator[tuple[Any, CacheSize]]:
        found = self._of(column)
        if "error" in found:
            raise RunError(str(found["error"]))
        if len(found["parts"]) != len(batches):
            raise RunError(f"{self.path} answers {len(found['parts'])} batches of {len(batches)}")
        for batch, part, size, values in zip(batches, *(found[name] for name in PER_BATCH), strict=True):
            dynamic = round(values * given.model.dtype.itemsize)
            yield column.read_part(batch, part), CacheSize(size, values, dynamic_bytes=dynamic)

    def _of(self, column: Column) -> Mapping[str, Any]:
        found: Mapping[str, Any] = next(one for one in self.content["columns"] if one["title"] == column.title)
        return found


def check(content: object) -> None:
    """Raises ValueError that names the first missing or wrong entry of results."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    for name, kind in ENTRIES.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"it has no {name}")
    for position, column in enumerate(content["columns"]):
        if not isinstance(column, dict) or not isinstance(column.get("title"), str) or "settings" not in column:
            raise ValueError(f"columns[{position}] has no title or settings")
        counts = {len(part) if isinstance(part := column.get(name), list) else None for name in PER_BATCH}
        if "error" not in column and (len(counts) != 1 or None in counts):
            raise ValueError(f"columns[{position}] has no lists of as many {', '.join(PER_BATCH)}")
