"""Writing a file that is either the old one or the new one, or a folder that is there whole, whatever happens in between."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary name in the same folder to write to, fsyncs what was written, renames it to `path`, fsyncs the folder.

    A link is followed: the file it names is replaced and the link stays. Missing folders are made. On any failure the
    temporary file is removed and `path` is as it was; a process killed outright leaves `path` as it was too. Raises
    `OSError`.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        # O_EXCL and 0o666: never another's file, and the permissions the user's umask gives any new file.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        permissions = temporary.stat().st_mode
        yield temporary
        os.chmod(temporary, permissions)  # a library may have put a file of its own in the place
        _fsync(temporary)  # before the rename: else a power cut may leave the new name with no contents
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(target.parent)  # the rename itself


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `data` as `atomically` says."""
    with atomically(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a folder with a temporary name beside `path` to write files to, fsyncs them and renames it to `path`.

    On any failure nothing is left of it. Raises `OSError`, `FileExistsError` where `path` is there already.
    """
    target = Path(os.path.abspath(path))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for written in (*temporary.iterdir(), temporary):
            _fsync(written)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
