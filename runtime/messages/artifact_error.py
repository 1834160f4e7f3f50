"""The error for anything wrong with an artifact: its file, its contents, or the model it is used with."""

FIT_AGAIN = "run `calib fit` again"  # the remedy in most of these errors


class ArtifactError(ValueError):
    """An unusable artifact. The message is one line: what was found, what was expected, what to do. A run-time failure (exit 1)."""
