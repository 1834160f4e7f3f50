"""Atomic writes: whatever happens, a file is either the old one or the new one, and a folder is either complete or absent.

An incomplete file is in a temporary folder beside the target, on which its writer holds a lock. If a writer is killed its lock is
released, so the next writer to the same target can tell that the folder is abandoned, and removes it.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = 50  # characters of the target's name in a temporary one: up to 200 of the 255 bytes that a name may have


@contextmanager
def atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager: gives a temporary file in the same file system to write to; at the end fsyncs it, renames it to `path` and
    fsyncs the folder.

    A link is followed: the file that it names is replaced, and the link stays. A file that is replaced keeps its permissions.
    Missing folders are made. On any failure no temporary file is left and `path` is unchanged; if the process is killed `path` is
    unchanged too, and the temporary file stays until the next write to `path`. Raises `OSError`, with `path` as its file name if
    the system gives none (as for a full disk), also if `path` is no file: a folder, a pipe, a device, a name that ends in a slash.
    """
    target = _file_named(path)
    with _named(path), _unfinished(target) as folder:
        temporary = folder / target.name
        # O_EXCL and 0o666: the permissions the user's umask gives any new file.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        permissions = (target if target.exists() else temporary).stat().st_mode
        yield temporary
        os.chmod(temporary, permissions)  # a library may have replaced the file by one of its own
        _fsync(temporary)  # before the rename: else a power cut may leave the new name with no contents
        os.replace(temporary, target)
    _fsync(target.parent)  # the rename itself


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `data` to `path` with `atomically`; raises `OSError` likewise."""
    with atomically(path) as temporary:
        temporary.write_bytes(data)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises the `OSError` that `atomically` would raise, as far as that is known beforehand; leaves nothing behind."""
    _check_name(path)
    there = next(folder for folder in Path(os.path.realpath(path)).parents if folder.exists())
    with tempfile.TemporaryDirectory(dir=there):  # permissions alone say nothing of quotas, nor for root
        pass


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager: gives a folder with a temporary name beside `path` to write files to; at the end fsyncs these and renames
    the folder to `path`.

    On any failure nothing is left. Raises `OSError`, in particular `FileExistsError` if `path` exists already.
    """
    target = Path(os.path.abspath(path))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with _unfinished(target) as temporary:
        yield temporary
        for written in (*temporary.iterdir(), temporary):
            _fsync(written)
        os.rename(temporary, target)
    _fsync(target.parent)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Removes the temporary folders in `folder` that killed writers left: those that can be locked.

    Only those of writers to `name` (or to a long name with the same beginning); None: all, for a folder that is calib's own.
    """
    begins = ".+" if name is None else re.escape(name[:NAME])
    pattern = re.compile(rf"\.{begins}\.[0-9a-f]{{12}}\.tmp")
    with suppress(OSError):  # a folder that may not be listed
        for found in [Path(entry) for entry in os.scandir(folder) if pattern.fullmatch(entry.name)]:
            with suppress(OSError):
                lock = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(found, ignore_errors=True)
                finally:
                    os.close(lock)


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def _file_named(path: str | os.PathLike[str]) -> Path:
    """The file to write, with links followed; makes missing folders above it."""
    _check_name(path)
    # For `a/b/../c` b is made as well: else the file would be written and not be found under that name.
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(os.path.realpath(path))


def _check_name(path: str | os.PathLike[str]) -> None:
    """Raises OSError for a name that no file can have, and for an existing path that is not a regular file."""
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "Zero byte in the name", name)
    if os.path.isdir(name) or os.path.basename(name) in ("", ".", ".."):  # a real path has lost the slash of `new/`
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if os.path.exists(name) and not os.path.isfile(name):  # the rename would put a file where /dev/null was
        raise FileExistsError(errno.EEXIST, "Not a regular file", name)


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Context manager: a new folder beside `target`, locked; it is removed at the end unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target.parent, target.name)
    lock = None
    while lock is None:  # another writer's `remove_abandoned` may have run between making and locking
        folder = target.with_name(f".{target.name[:NAME]}.{secrets.token_hex(6)}.tmp")
        folder.mkdir()
        lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of `folder`; None if another process holds it, or has removed the folder."""
    try:
        found = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(found), os.stat(folder)):
            return found
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # a file system without locks: there no folder is ever taken for abandoned
        return found
    os.close(found)
    return None


def _fsync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
