"""The two kinds of errors that the command line reports, each as one line without a traceback."""


class UsageError(Exception):
    """The request itself is wrong (an unknown key; a named file that is missing, damaged or of another kind): exit status 2."""


class RunError(Exception):
    """The request is valid but failed while running (NaN activations, a full disk): exit status 1."""
