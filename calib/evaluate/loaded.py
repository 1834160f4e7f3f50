"""What a run loads before it measures: the model, its tokenizer and the artifact, on the device that was asked for."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.artifact_name import artifact_file, load_artifact, refused_as_usage
from calib.capture.language_model import load
from calib.capture.model_files import find_model
from calib.errors import UsageError
from calib.runtime import Artifact
from calib.runtime.messages.printable import printable


class Loaded(NamedTuple):
    """A model on its device, its tokenizer, and the artifact with the SHA-256 of its file, or None for both."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    artifact: Artifact | None
    artifact_hash: str | None


def loaded(model: str, dtype: str, device: str, artifact: str | None, threads: int | None) -> Loaded:
    """Loads what a request names and sets torch's threads, unless they are None; raises UsageError if anything is missing."""
    if threads is not None:
        torch.set_num_threads(threads)
    where = usable_device(device)
    found, digest = read_artifact(artifact)
    own, tokenizer = load(model, dtype)
    own.to(where)
    return Loaded(own, tokenizer, found, digest)


def usable_device(name: str) -> torch.device:
    """Returns the torch device of this name; raises UsageError if this machine has no such device."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"invalid value {printable(name)} for 'device' (such as cpu or cuda): {reason}") from error
    return device


def read_artifact(name: str | None) -> tuple[Artifact | None, str | None]:
    """Loads an artifact and returns it with the SHA-256 of its file, or (None, None) for no name.

    `name` is a local file, one in the checkout that the package runs from, a folder with one artifact, or a hub repository.
    """
    if name is None:
        return None, None
    packaged = Path(find_model(str(Path(name).parent))) / Path(name).name
    path = packaged if packaged.is_file() else artifact_file(name)
    return load_artifact(path), hashlib.sha256(path.read_bytes()).hexdigest()


def check_model(artifact: Artifact | None, model: PreTrainedModel) -> None:
    """Raises UsageError if the artifact was fitted for another model, even if no row uses it."""
    if artifact is not None:
        with refused_as_usage():
            artifact.check(model)
