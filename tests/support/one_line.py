"""The message of a refused request, as it is printed for a user."""

import pytest

from calib.runtime import compress


def message(error) -> str:
    """Return the message of a `pytest.raises` result; assert that it is one line of fewer than 400 characters."""
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 400
    return text


def refused(model, method: str, options: dict, artifact=None, kind: type[Exception] = ValueError) -> str:
    """Assert that `compress` refuses the options and leaves the model unchanged; return the message."""
    before = model.config._attn_implementation
    with pytest.raises(kind, match=r"\S") as error:
        compress(model, method, artifact, **options)
    assert model.config._attn_implementation == before
    assert not model._forward_hooks and not model._forward_pre_hooks
    return message(error)
