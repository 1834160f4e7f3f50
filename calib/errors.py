"""The two kinds of failure a person at the command line meets; each is one line without a traceback."""


class UsageError(Exception):
    """The request itself is wrong (an unknown key, a missing file named on the command line): exit status 2."""


class RunError(Exception):
    """The request was fine and could not be carried out (a corrupt file, NaN activations): exit status 1."""
