"""Checks before hours of work whether the outputs can be written; the checks leave no files."""

import os

from calib.errors import UsageError
from calib.runtime.files.atomic_file import check_writable


def check_file(option: str, path: str | os.PathLike[str]) -> None:
    """Raises UsageError if the file could not be written; `option` names it in the message."""
    _check(option, path, path)


def check_folder(option: str, folder: str | os.PathLike[str]) -> None:
    """Raises UsageError if no file could be written into the folder, which need not exist."""
    _check(option, folder, os.path.join(folder, "file"))


def _check(option: str, given: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    try:
        check_writable(path)
    except OSError as error:
        raise UsageError(
            f"{option} '{os.fspath(given)}' cannot be written ({error.strerror}); choose a folder with room and write permission"
        ) from error
