"""An artifact and its card in a folder, with the same files as a repository of the hub."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from calib.runtime.files.atomic_file import write_atomically
from calib.runtime.hub.card import CARD, card
from calib.runtime.hub.find import NAME
from calib.runtime.messages.artifact_error import ArtifactError

if TYPE_CHECKING:
    from calib.runtime.artifact.artifact import Artifact


def save(
    artifact: "Artifact", folder: str | os.PathLike[str], where: str, license: str | None, base_model: str | None
) -> None:
    """Saves the artifact and its card; options as in `Artifact.save_pretrained`. `where` is the name that the card tells readers to
    load. Raises `ArtifactError`."""
    path = Path(folder, CARD)
    try:
        existing = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
        text = card(artifact, existing, where, license, base_model)
        artifact.save(Path(folder, NAME))
        if text is not None:
            write_atomically(path, text.encode())
    except OSError as error:
        raise ArtifactError(
            f"{path}: cannot be written ({error.strerror}); choose a folder with room and write permission"
        ) from error
