"""The file of a shard: the raw statistics that one of several machines has measured on its part of the corpus.

A safetensors file with the buffers of the statistics that its stages fill, named `STATISTIC.BUFFER`, as in a stage's checkpoint;
also `signature`, of the `klt` bases, if the errors of components were measured. Its metadata has one entry, a line of JSON:

    format     "1"
    shard      "2/8"
    stages     ["statistics", "sensitivity"]
    settings   all settings that the statistics depend on, with hashes of the model and of the tokens
    versions   of the software
    base       hash of the shards of earlier stages; "" for none
    sums       SHA-256 of each statistic's buffers
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from calib.capture.shard import Shard
from calib.errors import RunError, UsageError
from calib.runtime.files import canonical_json
from calib.runtime.files.atomic_file import atomically
from calib.runtime.files.tensor_bytes import tensor_bytes
from calib.runtime.messages.printable import LENGTH, printable, shortened

FORMAT = "1"
KEY = "calib_shard"  # the only entry of the file's metadata
SIGNATURE = "signature"
PARTS: Mapping[str, type] = {
    "format": str,
    "shard": str,
    "stages": list,
    "settings": dict,
    "versions": dict,
    "base": str,
    "sums": dict,
}
AGAIN = "measure this shard again"


@dataclass(frozen=True)
class ShardFile:
    """A shard's file with only its metadata read.

    Attributes:
        path: of the file.
        document: its metadata, which has all entries of `PARTS` with the right types.
    """

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> "ShardFile":
        """Reads the metadata. Raises UsageError if the file is missing, damaged, or not a shard's."""
        if not path.is_file():
            raise UsageError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}, expected a shard's file")
        try:
            with safe_open(os.fspath(path), "pt") as file:
                text = (file.metadata() or {}).get(KEY)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path}: cannot be read ({reason(error)}); {AGAIN}") from error
        if text is None:
            raise UsageError(f"{path}: is no shard of a fit; `calib fit --shard K/N` writes one")
        try:
            document = canonical_json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path}: its metadata is not JSON ({reason(error)}); {AGAIN}") from error
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise UsageError(
                f"{path}: has format {printable(found)}, expected {FORMAT!r}; merge with the version that wrote it"
            )
        for name, kind in PARTS.items():
            if type(document.get(name)) is not kind:
                raise UsageError(f"{path}: its {name!r} is {printable(document.get(name))}; {AGAIN}")
        return cls(path, document)

    @property
    def shard(self) -> Shard:
        """The number of this shard, and of how many."""
        return Shard.of(self.document["shard"])

    def buffers(self, statistic: str, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the buffers of one statistic by name, on the CPU.

        Args:
            statistic: its name in `Calibration.statistics`.
            expected: buffers with the names, shapes and dtypes that the file must have.

        Raises UsageError if names, shapes or dtypes differ, or the bytes do not match their SHA-256.
        """
        found = {name: self.tensor(f"{statistic}.{name}", like) for name, like in expected.items()}
        if digest(found) != self.document["sums"].get(statistic):
            raise UsageError(f"{self.path}: {statistic} was changed after it was written; {AGAIN}")
        return found

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """Returns one tensor on the CPU; raises UsageError unless it exists with the shape and dtype of `like`."""
        try:
            with safe_open(os.fspath(self.path), "pt") as file:
                found: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{self.path}: cannot be read ({reason(error)}); {AGAIN}") from error
        if (found.shape, found.dtype) != (like.shape, like.dtype):
            raise UsageError(
                f"{self.path}: {name} is {found.dtype} {list(found.shape)}, expected {like.dtype} {list(like.shape)}; {AGAIN}"
            )
        return found


def write(
    path: Path, document: Mapping[str, Any], statistics: Mapping[str, Mapping[str, Tensor]], signature: Tensor | None
) -> None:
    """Writes a shard's file atomically.

    Args:
        path: of the file.
        document: the metadata without `format` and `sums`.
        statistics: by name, the buffers of each by name.
        signature: of the `klt` bases in which components were measured; None without them.

    Raises RunError if the file cannot be written.
    """
    tensors = {
        f"{statistic}.{name}": tensor.detach().cpu().contiguous()
        for statistic, buffers in statistics.items()
        for name, tensor in buffers.items()
    }
    sums = {statistic: digest(buffers) for statistic, buffers in statistics.items()}
    whole = canonical_json.plain({"format": FORMAT, **document, "sums": sums}, "shard")
    if signature is not None:
        tensors[SIGNATURE] = signature
    try:
        with atomically(path) as temporary:
            safetensors.torch.save_file(tensors, temporary, {KEY: canonical_json.dumps(whole)})
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({reason(error)}); choose a folder with room") from error


def digest(buffers: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of the buffers' names and bytes, in the names' order."""
    found = hashlib.sha256()
    for name in sorted(buffers):
        found.update(name.encode())
        found.update(tensor_bytes(buffers[name].detach().cpu()))
    return found.hexdigest()


def reason(error: Exception) -> str:
    """Returns the first line of the error's message, shortened."""
    return shortened(next(iter(str(error).splitlines()), type(error).__name__), 2 * LENGTH)
