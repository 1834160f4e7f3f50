"""Writing a file that is either the old one or the new one, or a folder that is there whole, whatever happens in between.

What is not complete lies in a folder of its own beside the target, which its writer keeps locked. A writer that was killed has let
go of its lock, so the next one to the same target knows what nobody goes on with, and removes it.
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

NAME = 50  # characters of the target's name in a temporary one: up to 200 bytes of the 255 that a name may have


@contextmanager
def atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary name in the same file system to write to, fsyncs what was written, renames it to `path`, fsyncs the folder.

    A link is followed: the file it names is replaced and the link stays. A file that is replaced keeps its permissions; what is no
    file (a folder, a pipe, a device, a name that ends in a slash) is refused. Missing folders are made. On any failure nothing
    temporary is left and `path` is as it was; a process killed outright leaves `path` as it was too, and what it had written until
    the next one writes there. Raises `OSError`, which names `path` where the system names no file, as of a full disk.
    """
    target = _file_named(path)
    with _named(path), _unfinished(target) as folder:
        temporary = folder / target.name
        # O_EXCL and 0o666: the permissions the user's umask gives any new file.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        permissions = (target if target.exists() else temporary).stat().st_mode
        yield temporary
        os.chmod(temporary, permissions)  # a library may have put a file of its own in the place
        _fsync(temporary)  # before the rename: else a power cut may leave the new name with no contents
        os.replace(temporary, target)
    _fsync(target.parent)  # the rename itself


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `data` as `atomically` says."""
    with atomically(path) as temporary:
        temporary.write_bytes(data)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises the `OSError` that `atomically` would, as far as that can be told beforehand; makes nothing that stays."""
    _check_name(path)
    there = next(folder for folder in Path(os.path.realpath(path)).parents if folder.exists())
    with tempfile.TemporaryDirectory(dir=there):  # asking for permissions says nothing of quotas and of root
        pass


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a folder with a temporary name beside `path` to write files to, fsyncs them and renames it to `path`.

    On any failure nothing is left of it. Raises `OSError`, `FileExistsError` where `path` is there already.
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
    """Removes what writers that are gone left in `folder`: whatever can be locked.

    Of writers to `name`, or to a long name that begins alike; None: of all, for a folder in which nobody but us writes.
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
    """The file to write, links followed, with the folders before it made."""
    _check_name(path)
    # Of `a/b/../c` b as well: else the file is written and not found under that name.
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(os.path.realpath(path))


def _check_name(path: str | os.PathLike[str]) -> None:
    """Raises OSError for a name of no file, and for what is there and is none."""
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "Zero byte in the name", name)
    if os.path.isdir(name) or os.path.basename(name) in ("", ".", ".."):  # a real path has lost the slash of `new/`
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if os.path.exists(name) and not os.path.isfile(name):  # the rename would put a file where /dev/null was
        raise FileExistsError(errno.EEXIST, "Not a regular file", name)


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, locked, and gone afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target.parent, target.name)
    lock = None
    while lock is None:  # another's `remove_abandoned` may have come between making and locking
        folder = target.with_name(f".{target.name[:NAME]}.{secrets.token_hex(6)}.tmp")
        folder.mkdir()
        lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of `folder`; None where another holds it, or has removed the folder."""
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
    except OSError:  # a file system without locks: nothing of ours is ever taken for abandoned there
        return found
    os.close(found)
    return None


def _fsync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
