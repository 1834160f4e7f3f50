"""Finds a model's files: in a local folder, in a GGUF file, or by a name on the Hugging Face hub."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import calib
from calib.errors import UsageError
from calib.runtime.messages.printable import printable

GGUF = ".gguf"


@dataclass(frozen=True)
class ModelFiles:
    """Arguments for transformers' `from_pretrained`.

    Attributes:
        asked: the path as the user gave it.
        path: a local folder, or a name on the hub.
        gguf: the GGUF file in that folder, with configuration, weights and tokenizer; None: `path` is a checkpoint.
        local: whether `path` is a local folder.
    """

    asked: str
    path: str
    gguf: str | None
    local: bool

    @staticmethod
    def find(asked: str) -> "ModelFiles":
        """Returns the files of `model.path`; raises UsageError if it is no folder, GGUF file or hub name."""
        found = Path(find_model(asked))
        if found.is_file() and found.suffix == GGUF:
            missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
            if missing:
                raise UsageError(
                    f"model.path {printable(asked)} is a GGUF file, which needs {' and '.join(missing)}: "
                    "pip install 'calib-kv[gguf]'"
                )
            return ModelFiles(asked, str(found.parent), found.name, True)
        local = found.is_dir()
        if found.is_file() or (not local and not is_hub_name(str(found))):
            raise UsageError(f"model.path '{asked}' is no folder, no {GGUF} file and no hub name such as owner/name")
        return ModelFiles(asked, str(found), None, local)

    @property
    def options(self) -> dict[str, str]:
        """Keyword arguments of `from_pretrained` besides the path."""
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def find_model(path: str) -> str:
    """Returns `path`, or the folder of that relative path in this package's checkout if there is none in the working folder."""
    checkout = Path(calib.__file__).resolve().parents[1] / path
    if not Path(path).exists() and not Path(path).is_absolute() and checkout.is_dir():
        return str(checkout)
    return path


def is_hub_name(path: str) -> bool:
    """Returns whether `path` has the form of a hub name: `name` or `owner/name`."""
    parts = path.split("/")
    return len(parts) <= 2 and all(part and part not in (".", "..", "~") for part in parts)


def model_name(path: str) -> str:
    """Returns a local model's folder name, a GGUF file's name without its suffix, or the hub name."""
    found = Path(find_model(path))
    if found.suffix == GGUF and found.is_file():
        return found.stem
    return found.resolve().name if found.is_dir() else path
