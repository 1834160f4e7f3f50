"""Canonical JSON: equal values give equal texts, so that they can be hashed and compared."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from calib.runtime.messages.artifact_error import ArtifactError
from calib.runtime.messages.printable import printable, shortened

DEEPEST = 32  # levels of nesting; real provenance has 4, and a hostile file must not reach Python's recursion limit
LONGEST = 120  # characters of an entry's name in a message


def plain(value: object, where: str, path: tuple[str, ...] = ()) -> Any:
    """Converts `value` to JSON's own types: tuples become lists, integer keys strings; `where` and `path` name it in an error.

    Raises `ArtifactError` naming the entry for NaN, infinities, other types and nesting beyond 32 levels.
    """
    if len(path) > DEEPEST:
        raise ArtifactError(f"{shown(where, path)} is nested deeper than {DEEPEST} levels; flatten it")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ArtifactError(
                f"{shown(where, path)} is {value}, expected a finite number; leave it out or write null"
            )
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise ArtifactError(
                    f"{shown(where, path)} has the key {printable(key)} of type {type(key).__name__}, expected text"
                )
        return {str(key): plain(entry, where, (*path, f".{key}")) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, where, (*path, f"[{index}]")) for index, entry in enumerate(value)]
    raise ArtifactError(
        f"{shown(where, path)} is a {type(value).__name__}, expected a number, text, a list or a mapping"
    )


def shown(where: str, path: tuple[str, ...]) -> str:
    """The name of an entry, for a message."""
    return shortened("".join((where, *(shortened(part, LONGEST) for part in path))), LONGEST)


def dumps(value: object) -> str:
    """The canonical text of a `plain` value: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Parses strict JSON; raises `ValueError` for anything else, also for NaN, infinities and too deep nesting."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def sha256(value: object) -> str:
    """Hexadecimal SHA-256 of the canonical text of a `plain` value."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()
