"""The file of a saved cache: safetensors with one entry of metadata, a line of JSON; and the checks before it is used.

The checks are against accidents, and against forged files that would cause a crash: what is read has the right types, is finite,
and no more than the file's own size is allocated for it. They are no authentication: anyone who can write the file can write its
checksums.
"""

import os
import stat
import zlib
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from calib.runtime.artifact.fingerprint import ROUNDINGS
from calib.runtime.files import canonical_json
from calib.runtime.files.atomic_file import atomically
from calib.runtime.files.canonical_json import DEEPEST
from calib.runtime.files.state import StateError, check_values
from calib.runtime.files.tensor_bytes import tensor_bytes
from calib.runtime.messages.printable import LENGTH, printable, shortened

FORMAT = "5"
KEY = "calib_prefix"  # the only entry of the file's metadata
PARTS: Mapping[str, type] = {
    "crc32": int,
    "fingerprint": dict,
    "format": str,
    "made": dict,
    "numbers": dict,
    "sha256": str,
    "stages": str,
}
AGAIN = "run the prompt again and save its cache anew"


def write(path: str | os.PathLike[str], document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a file atomically; format and checksums are added to `document`. Raises OSError, SafetensorError, StateError."""
    _check_spelling(path)
    whole = {"format": FORMAT, "crc32": crc32(tensors), **document}
    whole["sha256"] = canonical_json.sha256(whole)
    with atomically(path) as temporary:
        safetensors.torch.save_file(dict(tensors), temporary, {KEY: canonical_json.dumps(whole)})


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the checked document and all tensors, which are mapped from the file.

    Raises OSError if there is no such file, StateError if it is not a saved cache or damaged.
    """
    _check_spelling(path)
    try:
        kind = os.stat(path).st_mode
    except ValueError as error:  # a zero byte
        raise StateError(f"is no path ({error}); name a file of `cache.save`") from error
    if not stat.S_ISREG(kind):  # opening a pipe would wait for ever
        raise StateError(f"is {'a folder' if stat.S_ISDIR(kind) else 'no regular file'}; name a file of `cache.save`")
    try:
        with safe_open(os.fspath(path), "pt") as file:
            document = _document((file.metadata() or {}).get(KEY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (
        SafetensorError,
        RuntimeError,
        TypeError,
        OverflowError,
    ) as error:  # of torch, for shapes that it cannot have
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StateError(f"cannot be read ({shortened(reason, 2 * LENGTH)}); {AGAIN}") from error
    for name, tensor in tensors.items():
        check_values(name, tensor)
    if crc32(tensors) != document["crc32"]:
        raise StateError(f"its tensors were changed after they were written; {AGAIN}")
    return document, tensors


def _check_spelling(path: str | os.PathLike[str]) -> None:
    """Raises StateError for an object that is no path, and for a path that safetensors can write but not open again."""
    if not isinstance(path, str | os.PathLike):
        raise StateError("is no path; name a file of `cache.save`")
    if any(
        "\ud800" <= character <= "\udfff" for character in os.fspath(path)
    ):  # a byte that is no UTF-8, as Python has it
        raise StateError("its path is not UTF-8, which safetensors cannot open; name the file or its folder otherwise")


def _document(text: str | None) -> dict[str, Any]:
    if text is None:
        raise StateError("is no saved cache; name a file of `cache.save`")
    try:
        document = canonical_json.loads(text)
    except ValueError as error:
        raise StateError(f"its metadata is not JSON ({shortened(str(error), LENGTH)}); {AGAIN}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise StateError(f"has format {printable(found)}, expected {FORMAT!r}; read it with the version that wrote it")
    if not _is_flat(document):
        raise StateError(f"its metadata is nested deeper than {DEEPEST} levels; {AGAIN}")
    rest = {name: part for name, part in document.items() if name != "sha256"}
    try:
        sealed = canonical_json.sha256(rest) == document.get("sha256")
    except ValueError:  # numbers such as 1e999
        sealed = False
    if not sealed or document.keys() != PARTS.keys():
        raise StateError(f"its metadata was changed after it was written; {AGAIN}")
    for name, kind in PARTS.items():
        if type(document[name]) is not kind:
            raise StateError(f"its {name!r} is {printable(document[name])}, expected {kind.__name__}; {AGAIN}")
    weights = document["fingerprint"].get("weights")
    if not isinstance(weights, dict) or weights.keys() != ROUNDINGS.keys():
        raise StateError(f"its 'weights' are {printable(weights)}, expected a hash for {', '.join(ROUNDINGS)}; {AGAIN}")
    return document


def _is_flat(value: Any) -> bool:
    """Whether `value` is nested at most `DEEPEST` levels deep; later functions walk it recursively."""
    level = [value]
    for _ in range(DEEPEST):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
        if not level:
            return True
    return False


def crc32(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of all names and bytes, sorted by name: against accidents, and several times as fast as a hash."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(tensor_bytes(tensors[name]), found)
    return found
