"""Writes a folder of files, some of them hard links, completely or not at all."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from calib.errors import RunError
from calib.runtime.files.atomic_file import new_folder


def write_folder(output: Path, contents: Mapping[str, bytes | Path], links: Mapping[str, Path]) -> None:
    """Creates the folder `output`, which must not exist.

    Args:
        output: the folder.
        contents: by file name, bytes to be written, or files to be copied.
        links: by file name, files to be hard-linked, or copied if the file system does not allow links.

    Raises `RunError` if it cannot be written; the folder is removed then.
    """
    try:
        with new_folder(output) as folder:
            for name, content in contents.items():
                if isinstance(content, bytes):
                    (folder / name).write_bytes(content)
                else:
                    shutil.copyfile(content, folder / name)
            for name, source in links.items():
                try:
                    os.link(os.path.realpath(source), folder / name)  # files in the hub's cache are symbolic links
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(source, folder / name)
    except OSError as error:
        raise RunError(f"{output}: cannot be written ({error.strerror}); choose a folder with room") from error
