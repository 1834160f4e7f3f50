"""Errors of the hub's client as one line with a remedy. No message ever holds a token."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from calib.runtime.hub.client import Token
from calib.runtime.messages.artifact_error import ArtifactError
from calib.runtime.messages.printable import printable, shortened

LOGIN = "`hf auth login`, or pass token="
LONGEST = 160  # characters of another library's message


@contextmanager
def in_one_line(repo_id: str, filename: str, revision: str | None, token: Token) -> Iterator[None]:
    """Context manager: turns any error of the client about `filename` in `repo_id` into an `ArtifactError`."""
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:  # the client raises its own types, those of HTTP, of sockets and of the disk
        line = f"{repo_id}: {reason(error, repo_id, filename, revision)}"
        for secret in (token, get_token()):
            if isinstance(secret, str) and secret:
                line = line.replace(secret, "[token]")
        raise ArtifactError(line) from error


def reason(error: BaseException, repo_id: str, filename: str, revision: str | None) -> str:
    """The text of the message: what happened, what was expected, and the remedy."""
    at = f" --revision {revision}" if revision else ""
    match error:
        case HFValidationError():
            return (
                "not a valid name of a repository on the hub, expected one such as 'owner/name'; check the name or path"
            )
        case GatedRepoError():
            return f"is gated on the hub; ask for access on {constants.ENDPOINT}/{repo_id}, then {LOGIN}"
        case RepositoryNotFoundError():
            return (
                f"no such repository of the hub that you may see; check the name or path, and if it is private {LOGIN}"
            )
        case RevisionNotFoundError():
            return f"the hub's repository has no revision {printable(revision)}; name a branch, a tag or a whole commit hash"
        case RemoteEntryNotFoundError():
            where = shortened(revision or "main", LONGEST)
            return f"the hub's repository has no file {printable(filename)} in {where}; name one that it has"
        case LocalTokenNotFoundError():
            return f"the hub client needs a token, and none is stored; {LOGIN}"
        case LocalEntryNotFoundError():
            return (
                f"{hindrance(error.__cause__)}, and there is no copy in its cache; run `hf download {repo_id} "
                f"{filename}{at}` where there is a network"
            )
        case OfflineModeIsEnabled():
            return f"{hindrance(error)}; try again where there is a network"
        case HfHubHTTPError() if error.response.status_code == 401:
            return f"the hub needs a valid token, got an invalid one or none; {LOGIN}"
        case HfHubHTTPError() if error.response.status_code == 403:
            return f"the hub does not allow it; a token that may write to {repo_id} is needed: {LOGIN}"
        case HfHubHTTPError():
            status = error.response.status_code
            remedy = "change what it names" if status < 500 else "try again later"
            return f"the hub answered {status} ({words(error.server_message or '')}); {remedy}"
        case ValueError() | RuntimeError() if error.__cause__ is not None:  # "failed due to the above error"
            return reason(error.__cause__, repo_id, filename, revision)
        case OSError() if not isinstance(error, ConnectionError):
            what = error.strerror or type(error).__name__
            return f"the hub's cache cannot be used ({what}); make room, or give another folder: cache_dir= or HF_HOME"
        case ValueError():
            return f"the hub's client refuses: {words(str(error))}"
    return (
        f"the hub cannot be reached ({type(error).__name__}: {words(str(error))}); check the connection, and try again"
    )


def hindrance(error: BaseException | None) -> str:
    """Why no request was made to the hub, or why it failed."""
    match error:
        case None:
            return "the hub is not asked (local_files_only)"
        case OfflineModeIsEnabled():
            return "the hub is not asked (HF_HUB_OFFLINE, or no connection)"
        case FileMetadataError():
            return f"{constants.ENDPOINT} does not answer as the hub does (HF_ENDPOINT, or a proxy)"
        case HfHubHTTPError():
            return f"the hub answered {error.response.status_code}"
    return f"the hub cannot be reached ({type(error).__name__})"


def words(text: str) -> str:
    """Another library's message on one line, shortened."""
    return shortened(" ".join(text.split()), LONGEST)
