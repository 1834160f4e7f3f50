"""What a command is given as its artifact: a file, a folder that holds one, or a name on the Hugging Face hub."""

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
    """Inside, an artifact that is refused is a file that the user named: a UsageError."""
    from calib.runtime.artifact.artifact import ArtifactError

    try:
        yield
    except ArtifactError as error:
        raise UsageError(str(error)) from error


def load_artifact(path: Path) -> "Artifact":
    """The artifact in a file that the user named; UsageError where it is refused."""
    from calib.runtime.artifact.artifact import Artifact

    with refused_as_usage():
        return Artifact.load(path)


def artifact_file(name: str) -> Path:
    """The file on this machine: the only one of a folder, downloaded where `name` is `owner/name` of the hub and nothing is called
    so here.

    Raises UsageError for what can be neither, and `ArtifactError` for what the hub does not give.
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
