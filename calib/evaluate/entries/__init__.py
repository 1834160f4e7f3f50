"""The rows of a configuration's `methods`: our methods, caches of transformers, and answers that another program gave."""

from collections.abc import Mapping, Sequence
from typing import Any

from calib.errors import UsageError
from calib.evaluate.entries.entry import CacheEntry, Entry, Given, is_mapping
from calib.evaluate.entries.method import MethodEntry
from calib.evaluate.entries.peer import PeerEntry
from calib.evaluate.entries.results import ResultsEntry
from calib.runtime.messages.printable import printable

KINDS = ("method", "peer", "results")

__all__ = ["CacheEntry", "Entry", "Given", "MethodEntry", "PeerEntry", "ResultsEntry", "items", "read_entries"]


def read_entries(content: Any) -> tuple[Entry, ...]:
    """Builds the rows from `methods`; an item `{group: TEXT}` is a heading for the rows after it. Raises UsageError."""
    entries, group = [], ""
    for position, item in enumerate(items(content, "methods", "{name: LABEL, method: NAME, ...}")):
        if set(item) == {"group"}:
            group = str(item["group"] or "")
            continue
        options = dict(item)
        label, kinds = options.pop("name", None), [kind for kind in KINDS if kind in options]
        if len(kinds) != 1 or not isinstance(item[kinds[0]], str):
            raise UsageError(
                f"methods[{position}] needs one of `method` (a name from `calib methods`), `peer` or `results`: {printable(item)}"
            )
        word = options.pop(kinds[0])
        name = str(label or word)
        if kinds == ["method"]:
            entries.append(MethodEntry.of(name, group, word, options))
        elif kinds == ["peer"]:
            entries.append(PeerEntry(name, group, options, word))
        else:
            entries.append(ResultsEntry.of(name, group, options, word))
    return tuple(entries)


def items(content: Any, key: str, example: str) -> Sequence[Mapping[str, Any]]:
    """Returns `content` if it is a non-empty list of mappings with text keys; raises UsageError otherwise."""
    if not isinstance(content, list) or not content:
        raise UsageError(f"'{key}' must be a list of entries such as `{example}`, got {printable(content)}")
    for position, item in enumerate(content):
        if not is_mapping(item) or not all(isinstance(name, str) for name in item):
            raise UsageError(f"{key}[{position}] must be an entry such as `{example}`, got {printable(item)}")
    return content
