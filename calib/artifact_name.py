"""What a command is given as its artifact: a file, or a name on the Hugging Face hub."""

import os
from pathlib import Path

from calib.errors import UsageError


def artifact_file(name: str) -> Path:
    """The file on this machine, downloaded where `name` is `owner/name` of the hub and nothing is called so here.

    Raises UsageError for what can be neither, and `ArtifactError` for what the hub does not give.
    """
    if os.path.isfile(name):
        return Path(name)
    from calib.runtime.hub.find import find, is_hub_name

    if os.path.exists(name) or "/" not in name or not is_hub_name(name):
        found = "is a folder" if os.path.isdir(name) else "is no file"
        raise UsageError(f"artifact '{name}' {found}, expected an artifact; `calib fit` writes one")
    from calib.capture.language_model import without_waiting_for_the_hub

    with without_waiting_for_the_hub():
        return find(name)
