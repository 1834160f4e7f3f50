"""The message of a refused request, as it is printed for a user."""


def message(error) -> str:
    """Return the message of a `pytest.raises` result; assert that it is one line of fewer than 400 characters."""
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 400
    return text
