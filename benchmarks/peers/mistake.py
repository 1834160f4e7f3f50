"""A mistake of the user's, and errors in one line."""


class Wrong(Exception):
    """In one line: the value, what is expected, the remedy."""


def one_line(error: Exception) -> str:
    """The message; the type where there is none."""
    return " ".join(str(error).split()) or type(error).__name__
