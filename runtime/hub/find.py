"""Finds an artifact: a file, a folder that holds one, or a repository of the hub, from which it is downloaded once.

    find("my.calib.safetensors"), find("artifacts"), find("owner/name", revision="v1")

In a repository (or folder) the artifact is `calib.safetensors`, or else the only `*.calib.safetensors`, which is how
`calib fit` names its files. A path that exists locally is used without a request to the hub.
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from calib.runtime.hub.client import Token, client
from calib.runtime.hub.failures import in_one_line
from calib.runtime.messages.artifact_error import ArtifactError
from calib.runtime.messages.printable import printable, shortened

NAME = "calib.safetensors"
LONGEST = 160  # characters of names in a message


def find(
    name: str | os.PathLike[str],
    *,
    filename: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    token: Token = None,
) -> Path:
    """Returns the local path of the artifact's file; options as in `Artifact.from_pretrained`.

    A path that does not exist and cannot be a hub name is returned as it is. Raises `ArtifactError`.
    """
    word = os.fspath(name)
    if os.path.exists(word) or not is_hub_name(word):
        return find_here(word, filename, revision)
    if force_download and local_files_only:
        raise ArtifactError(f"{word}: force_download and local_files_only exclude each other; leave one out")
    if filename is not None and (filename.startswith("/") or ".." in filename.split("/")):
        raise ArtifactError(f"{word}: filename={printable(filename)} is not inside the repository; name a file of it")
    api = client(token)
    fetch = partial(
        api.hf_hub_download,
        word,
        revision=revision,
        cache_dir=cache_dir,
        force_download=force_download,
        local_files_only=local_files_only,
    )
    with in_one_line(word, filename or NAME, revision, token):
        try:
            return Path(fetch(filename=filename or NAME))
        except EntryNotFoundError as missing:
            if filename is not None:
                raise
            if isinstance(missing, LocalEntryNotFoundError):  # no request was made: the cache may have another name
                names = cached_names(api, word, revision, cache_dir)
                if not any(map(is_artifact, names)):
                    raise
            else:
                names = api.list_repo_files(word, revision=revision)
            return Path(fetch(filename=chosen(names, word)))


def is_hub_name(word: str) -> bool:
    """Whether `word` can be `owner/name` (or `name`, as the hub's oldest repositories are called)."""
    parts = word.split("/")
    return len(parts) <= 2 and not word.endswith(".safetensors") and not {"", ".", "..", "~"} & set(parts)


def find_here(word: str, filename: str | None, revision: str | None) -> Path:
    """Returns the artifact's file for a local file or folder; a path that does not exist is returned as it is."""
    if revision is not None and os.path.exists(word):
        raise ArtifactError(
            f"{word}: is a local path, which has no revisions, got revision={printable(revision)}; "
            "leave it out, or run in another folder to load the hub's repository of this name"
        )
    if not os.path.isdir(word):
        if filename is not None:
            raise ArtifactError(f"{word}: is no folder, got filename={printable(filename)} in it; leave it out")
        return Path(word)
    if filename is not None:
        return Path(word, filename)
    try:
        return Path(word, chosen(os.listdir(word), word))
    except OSError as error:
        raise ArtifactError(f"{word}: cannot be read ({error.strerror}); check its permissions") from error


def is_artifact(name: str) -> bool:
    """Whether the name of a file is that of an artifact at the top of a folder or repository."""
    return "/" not in name and (name == NAME or name.endswith(f".{NAME}"))


def chosen(names: Iterable[str], where: str) -> str:
    """Returns the artifact among `names`; raises `ArtifactError` if there is none, or several of which none is called `NAME`."""
    found = sorted(filter(is_artifact, names))
    if NAME in found or len(found) == 1:
        return NAME if NAME in found else found[0]
    if not found:
        raise ArtifactError(f"{where}: holds no {NAME} and no NAME.{NAME}, expected one; `calib fit` writes it")
    listed = shortened(", ".join(found[:4]), LONGEST) + (", ..." if len(found) > 4 else "")
    raise ArtifactError(
        f"{where}: holds {len(found)} artifacts ({listed}) and no {NAME}; name one of these files (in Python with filename=)"
    )


def cached_names(api: HfApi, repo_id: str, revision: str | None, cache_dir: str | Path | None) -> list[str]:
    """Names of the files at the top of a revision that are in the hub's cache; [] if it is not there."""
    try:
        return os.listdir(api.snapshot_download(repo_id, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except LocalEntryNotFoundError:
        return []
