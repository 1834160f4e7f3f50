"""Resolves a command's artifact argument: a file, a folder that holds one, or a name on the Hugging Face hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from calib.errors import UsageError

if TYPE_CHECKING:
    from calib.runtime.artifact.artifact import Artifact


@contextmanager
def refused_as_usage() -> Iterator[None]:
    """Context that turns `ArtifactError` into `UsageError`, for a file that the user named."""
    from calib.runtime.artifact.artifact import ArtifactError

    try:
        yield
    except ArtifactError as error:
        raise UsageError(str(error)) from error


def load_artifact(path: Path) -> "Artifact":
    """Returns the artifact in a file; raises UsageError if it is refused."""
    from calib.runtime.artifact.artifact import Artifact

    with refused_as_usage():
        return Artifact.load(path)


def artifact_file(name: str) -> Path:
    """Returns the local path of an artifact: a file, the artifact in a folder, or a download if `name` is only a hub name.

    Raises UsageError for any other name, and `ArtifactError` if the hub does not give the file.
    """
    if os.path.isfile(name):
        return Path(name)
    from calib.runtime.hub.find import find, is_hub_name

    if os.path.isdir(name):
        with refused_as_usage():
            return find(name)
    if os.path.exists(name) or "/" not in name or not is_hub_name(name):
        raise UsageError(f"artifact '{name}' is no file, expected an artifact; `calib fit` writes one")
    from calib.capture.language_model import without_waiting_for_the_hub

    with without_waiting_for_the_hub():
        return find(name)
