"""Whether outputs could be written, as far as that can be told before hours of work; nothing is left behind."""

import os

from calib.errors import UsageError
from calib.runtime.files.atomic_file import check_writable


def check_file(option: str, path: str | os.PathLike[str]) -> None:
    """Raises UsageError where the file could not be written."""
    _check(option, path, path)


def check_folder(option: str, folder: str | os.PathLike[str]) -> None:
    """Raises UsageError where no file could be written into the folder, which may be missing."""
    _check(option, folder, os.path.join(folder, "file"))


def _check(option: str, given: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    try:
        check_writable(path)
    except OSError as error:
        raise UsageError(
            f"{option} '{os.fspath(given)}' cannot be written ({error.strerror}); choose a folder with room and write permission"
        ) from error
