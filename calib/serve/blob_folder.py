"""Stores blobs as files of one folder. A missing or unreadable file is a cache miss; read and write errors are logged once.

A file's name is a hash of the codec's identity and of the engine's key, which is untrusted. So engines may share a folder, and a
codec never reads another codec's files. Files are in subfolders named by the first two digits of the hash, which keeps folders
small. Files are written atomically (`runtime/files/atomic_file.py`); the folder's size is not limited.
"""

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from calib.runtime.files.atomic_file import remove_abandoned, write_atomically
from calib.serve.refusals import Refusals

SUFFIX = ".klt"


class BlobFolder:
    """The files of one codec; threads and engines may share it.

    Args:
        folder: path of the folder, which is made. Raises ValueError if it cannot be made.
        identity: identity of the codec, and of everything else that must not be mixed.
        refusals: logs files that cannot be read or written.
    """

    def __init__(self, folder: str, identity: str, refusals: Refusals) -> None:
        self._folder, self._identity, self._refusals = Path(folder), identity, refusals
        # Subfolders in which temporary files of killed writers were removed: otherwise they would stay if their key never recurs.
        self._swept: set[Path] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"folder {folder} cannot be made ({error.strerror}), expected a folder or the name of a new one; give another"
            ) from error

    def has(self, key: str) -> bool:
        """Whether the blob's file exists and may be read; missing permission is logged. The content is not checked."""
        path = self._path(key)
        if os.access(path, os.R_OK):
            return True
        if os.path.exists(path):  # not `Path.exists`, which raises where a folder may not be searched
            self._cannot_be_read(os.strerror(errno.EACCES))
        return False

    def read(self, key: str) -> bytes | None:
        """Returns the blob, or None if it is missing or cannot be read; the latter is logged."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._cannot_be_read(str(error.strerror))
            return None

    def write(self, key: str, blob: Tensor) -> bool:
        """Stores a blob, uint8 `[bytes]` in host memory; returns whether it was written. A failure is logged."""
        path = self._path(key)
        if path.parent not in self._swept:
            remove_abandoned(path.parent)
            self._swept.add(path.parent)
        if not os.access(path, os.R_OK):  # the new file would get the old one's permissions
            self.remove(key)
        try:
            write_atomically(path, blob.numpy().tobytes())
        except OSError as error:
            self._refusals.tell(
                ValueError(
                    f"folder {self._folder} takes no file ({error.strerror}), expected room and permission to write; make room or "
                    "give another"
                )
            )
            return False
        return True

    def remove(self, key: str) -> None:
        """Removes a blob, so that it can be stored again; without permission it is left."""
        with suppress(OSError):
            self._path(key).unlink()

    def clear(self) -> None:
        """Removes all blobs of the folder, including those of other engines."""
        for path in self._folder.glob(f"*/*{SUFFIX}"):
            path.unlink(missing_ok=True)

    def _cannot_be_read(self, why: str) -> None:
        self._refusals.tell(
            ValueError(
                f"a file of folder {self._folder} cannot be read ({why}), expected permission to read; remove it, or give another "
                "folder"
            )
        )

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(f"{self._identity} {key}".encode()).hexdigest()
        return self._folder / name[:2] / f"{name}{SUFFIX}"
