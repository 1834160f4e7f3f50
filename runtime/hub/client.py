"""The hub's client."""

from huggingface_hub import HfApi

from calib.runtime.messages.artifact_error import ArtifactError

Token = str | bool | None  # True: the one of `hf auth login`; None: that one if there is one; False: no token


def client(token: Token) -> HfApi:
    """Returns a client of the hub that HF_ENDPOINT names; no request is made yet.

    Raises `ArtifactError` for a token that no HTTP header can hold, because the client's own message would show the token.
    """
    if isinstance(token, str) and not (token.isascii() and token.isprintable() and token and " " not in token):
        raise ArtifactError(
            "the token is empty or holds spaces, line ends or other characters that no token has; "
            "pass it stripped, or leave it out after `hf auth login`"
        )
    return HfApi(token=token, library_name="calib")
