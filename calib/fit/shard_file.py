"""The file of a shard: what one machine of several has measured of a corpus, before anything is made of it.

Safetensors: the buffers of the statistics that its stages fill, `STATISTIC.BUFFER`, as a stage's checkpoint has them; with bases of
`klt` measured in, their `signature` as well. Metadata: one entry, a line of JSON:

    format     "1"
    shard      "2/8"
    stages     ["statistics", "sensitivity"]
    settings   all that the statistics depend on, the model's and the tokens' hashes among it
    versions   of the software
    base       which shards of earlier stages were measured before; "" for none
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
    """A shard's file, of which nothing but the metadata has been read.

    Attributes:
        path: of the file.
        document: its metadata, with the parts that belong to it.
    """

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> "ShardFile":
        """Raises UsageError where the file is missing, damaged, or none of a shard."""
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
        """Which one this is."""
        return Shard.of(self.document["shard"])

    def buffers(self, statistic: str, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of one statistic, by their names in it, on the CPU.

        Args:
            statistic: its name among a fit's.
            expected: buffers with the names, shapes and dtypes that they must have.

        Raises UsageError where the file has others, or others than were written.
        """
        found = {name: self.tensor(f"{statistic}.{name}", like) for name, like in expected.items()}
        if digest(found) != self.document["sums"].get(statistic):
            raise UsageError(f"{self.path}: {statistic} was changed after it was written; {AGAIN}")
        return found

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """One tensor, on the CPU; UsageError where there is none of the shape and dtype of `like`."""
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
    """Writes all of it or nothing.

    Args:
        path: of the file.
        document: the metadata without `format` and `sums`.
        statistics: the buffers of each, by name.
        signature: of the bases of `klt` that these were measured in, if any.

    Raises RunError where the folder or the disk does not allow it.
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
    """SHA-256 of names and bytes, in the names' order."""
    found = hashlib.sha256()
    for name in sorted(buffers):
        found.update(name.encode())
        found.update(tensor_bytes(buffers[name].detach().cpu()))
    return found.hexdigest()


def reason(error: Exception) -> str:
    """Of a failure, in a few words."""
    return shortened(next(iter(str(error).splitlines()), type(error).__name__), 2 * LENGTH)
