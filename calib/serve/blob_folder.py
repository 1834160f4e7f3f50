"""Blobs as files of one folder: what is not there, or cannot be read, is a miss; what cannot be read or written is said once.

A file's name is a hash of what identifies the codec and of the engine's key, which is untrusted. So engines may share a folder, and
one codec never meets another's files. They lie in subfolders by the name's first two digits, so that none gets long. Files are
written whole or not at all (`runtime/files/atomic_file.py`); nothing bounds the folder's size.
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
        folder: is made. Raises ValueError where it cannot be.
        identity: of the codec, and of whatever else must not be mixed.
        refusals: where it is said that the folder takes no files.
    """

    def __init__(self, folder: str, identity: str, refusals: Refusals) -> None:
        self._folder, self._identity, self._refusals = Path(folder), identity, refusals
        # Where what killed writers left is gone: a writer removes what others left of its own name, and a key may never come again.
        self._swept: set[Path] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"folder {folder} cannot be made ({error.strerror}), expected a folder or the name of a new one; give another"
            ) from error

    def has(self, key: str) -> bool:
        """Whether the blob's file is there, and may be read, else that is said; whether it can be used is seen when it is read."""
        path = self._path(key)
        if os.access(path, os.R_OK):
            return True
        if os.path.exists(path):  # not `Path.exists`, which raises where a folder may not be searched
            self._cannot_be_read(os.strerror(errno.EACCES))
        return False

    def read(self, key: str) -> bytes | None:
        """The blob, or None where it is not there, or cannot be read, which is said."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._cannot_be_read(str(error.strerror))
            return None

    def write(self, key: str, blob: Tensor) -> bool:
        """Stores a blob, uint8 `[bytes]` in host memory; whether it could be."""
        path = self._path(key)
        if path.parent not in self._swept:
            remove_abandoned(path.parent)
            self._swept.add(path.parent)
        if not os.access(path, os.R_OK):  # its permissions would be those of the new file
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
        """So that it is stored again; left where that is not permitted."""
        with suppress(OSError):
            self._path(key).unlink()

    def clear(self) -> None:
        """Removes all blobs of the folder, other engines' as well."""
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
