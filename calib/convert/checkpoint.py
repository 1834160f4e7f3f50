"""Checkpoint folders in safetensors: read and written one shard at a time, and created completely or not at all."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calib.errors import RunError, UsageError
from calib.runtime.files.atomic_file import new_folder

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def checkpoint_folder(output: Path) -> Iterator[Path]:
    """Context with a temporary folder that becomes `output` at the end, or is removed on any failure.

    Raises UsageError if `output` exists, RunError if it cannot be written.
    """
    if os.path.lexists(output):
        raise UsageError(f"'{output}' is there already and is not overwritten; name a new folder")
    try:
        with new_folder(output) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise RunError(f"'{output}' cannot be written ({error}); name another folder, or make room") from error


def read(path: Path) -> bytes:
    """Returns the content of a file; raises UsageError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UsageError:
    """Returns the error of a file of the given checkpoint that cannot be read."""
    return UsageError(f"cannot read '{path}' ({error.strerror or error}); give the folder of the whole checkpoint")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises UsageError if the file cannot be read or holds anything else."""
    try:
        content = json.loads(read(path).decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise UsageError(f"'{path}' holds a {type(content).__name__}, expected an object; download it again")
    return content


def shards(folder: Path) -> list[str]:
    """Returns the names of the checkpoint's weight files, sorted.

    Raises UsageError if it has none in safetensors, or not all that its index names.
    """
    if not (folder / INDEX).is_file():
        if (folder / WHOLE).is_file():
            return [WHOLE]
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        why = f"its weights are pickles ({pickles[0]}), which are never opened here" if pickles else "it has no weights"
        raise UsageError(
            f"'{folder}': {why}, expected {WHOLE} or {INDEX}; load the revision with safetensors, or convert the weights "
            "with the publisher's own code and save_pretrained"
        )
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, Mapping) or not named or not all(isinstance(name, str) for name in named.values()):
        raise UsageError(f"'{folder / INDEX}' does not name files of weights; download it again")
    names = sorted(set(named.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UsageError(f"'{folder}' has no file '{name}', which {INDEX} names; download it again")
    return names


def rewrite(
    source: Path, output: Path, change: Callable[[str, Tensor], Mapping[str, Tensor]], expected: Mapping[str, list[int]]
) -> None:
    """Writes the tensors of `source`, replaced by `change`, into the folder `output`, one shard for each shard.

    At most one shard is in memory.

    Args:
        source: a folder that `shards` accepts.
        output: an existing folder.
        change: returns for a tensor and its name the tensors, by name, that replace it; possibly none.
        expected: names and shapes of all tensors of the result.

    Raises:
        UsageError: a damaged or unreadable file, an unexpected tensor, shape or dtype, or a missing tensor.
    """
    placed: dict[str, str] = {}
    size = 0
    names = shards(source)
    for shard in names:
        tensors: dict[str, Tensor] = {}
        try:
            with safe_open(source / shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    tensors |= change(name, file.get_tensor(name))
        except OSError as error:
            raise unreadable(source / shard, error) from error
        except SafetensorError as error:
            raise UsageError(f"'{source / shard}' is damaged ({error}); download it again") from error
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                known = ", ".join(map(str, DTYPES))
                raise UsageError(
                    f"'{source / shard}' gives {name} as {tensor.dtype}, expected plain weights ({known}); give the checkpoint "
                    "that is not quantised"
                )
            if expected.get(name) != list(tensor.shape) or name in placed:
                raise UsageError(
                    f"'{source / shard}' gives the tensor {name} {list(tensor.shape)}, expected "
                    f"{expected.get(name, 'no such tensor')} by config.json, in one file only; give an unchanged checkpoint"
                )
        save_file(tensors, output / shard, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, shard)
        size += sum(tensor.nbytes for tensor in tensors.values())
    missing = sorted(expected.keys() - placed.keys())
    if missing:
        raise UsageError(
            f"'{source}' lacks {missing[0]} and {len(missing) - 1} more tensors; give the whole checkpoint"
        )
    if names != [WHOLE]:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
        (output / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
