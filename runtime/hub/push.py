"""An artifact and its card as one commit in a repository of the hub."""

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError

from calib.runtime.hub.card import CARD, card
from calib.runtime.hub.client import Token, client
from calib.runtime.hub.failures import in_one_line
from calib.runtime.hub.find import NAME

if TYPE_CHECKING:
    from calib.runtime.artifact.artifact import Artifact


def push(
    artifact: "Artifact",
    repo_id: str,
    *,
    private: bool | None = None,
    token: Token = None,
    revision: str | None = None,
    commit_message: str = "Upload calib artifact",
    create_pr: bool = False,
    license: str | None = None,
    base_model: str | None = None,
) -> CommitInfo:
    """Pushes the artifact and its card; options as in `Artifact.push_to_hub`. Raises `ArtifactError`."""
    api = client(token)
    with in_one_line(repo_id, CARD, revision, token):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # now with the owner's name
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        text = card(artifact, card_of(api, repo_id, revision), repo_id, license, base_model)
        files = {NAME: artifact.encoded(), **({} if text is None else {CARD: text.encode()})}
        return api.create_commit(
            repo_id,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in files.items()],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )


def card_of(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """Returns the repository's README.md, None if it has none."""
    try:
        return Path(api.hf_hub_download(repo_id, CARD, revision=revision)).read_text(encoding="utf-8", errors="replace")
    except EntryNotFoundError:
        return None
