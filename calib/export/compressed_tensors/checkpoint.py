"""Reads a model's folder: its configuration, and the safetensors file of each weight."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from calib.errors import UsageError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Keys of a configuration that describe how the weights are quantised; the second is an older name of the first.
QUANTIZATION = ("quantization_config", "compression_config")

# Weights in other formats are left out, so that a reader of the export need not choose between them and the safetensors.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder with its configuration and index read.

    Attributes:
        folder: of the model.
        config: content of `config.json`.
        files: name of the file of every weight, by the weight's name.
        total_size: bytes of all weights.
    """

    folder: Path
    config: Mapping[str, Any]
    files: Mapping[str, str]
    total_size: int

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads configuration, index and headers; raises `UsageError` if the folder is no model in safetensors files."""
        if not folder.is_dir():
            raise UsageError(f"--model {folder}: no such folder, expected a model's; download it first")
        config = read_json(folder / CONFIG)
        if (folder / SINGLE).is_file():  # if a folder has both, transformers reads this one
            files: Any = dict.fromkeys(names(folder / SINGLE), SINGLE)
        elif (folder / INDEX).is_file():
            files = read_json(folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(Path(str(name)).name == name for name in files.values()):
                raise UsageError(f"{folder / INDEX}: expected a weight_map of names of files in the same folder")
            for name in sorted(set(files.values())):
                missing = {weight for weight, file in files.items() if file == name} - set(names(folder / name))
                if missing:
                    raise UsageError(
                        f"{folder / name}: has no {min(missing)}, which {INDEX} promises; download it again"
                    )
        else:
            raise UsageError(
                f"--model {folder}: neither {SINGLE} nor {INDEX}, expected safetensors; load the model with transformers "
                "and save_pretrained it"
            )
        return cls(folder, config, files, sum(size(folder / name) for name in set(files.values())))

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The configuration's description of how the weights are quantised; None if they are not."""
        return next((self.config[key] for key in QUANTIZATION if self.config.get(key)), None)

    def tensor(self, name: str) -> Tensor:
        """Returns a weight as it is stored, on the CPU; memory-mapped, so its bytes are read when they are used."""
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def companions(self) -> list[Path]:
        """Returns the other files of the folder (tokenizer, generation settings, templates), without folders and hidden files."""
        files = [path for path in sorted(self.folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
        return [
            path
            for path in files
            if path.name not in (CONFIG, INDEX)
            and path.suffix not in OTHER_WEIGHTS
            and not path.name.endswith(".index.json")
        ]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises `UsageError` if it cannot be read or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); is this a model's folder?") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def names(path: Path) -> list[str]:
    """Returns the names of a safetensors file's tensors; raises `UsageError` if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: cannot be read as safetensors ({error}); download it again") from error


def size(path: Path) -> int:
    """Returns the bytes of a safetensors file's tensors: all but the header and the 8 bytes of its length."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
