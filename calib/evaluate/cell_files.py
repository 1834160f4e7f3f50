"""Finished cells on disk, one file each, so that an interrupted run can be continued and a repeated one takes seconds."""

import json
from pathlib import Path

from calib.evaluate.cell import Result
from calib.evaluate.result_check import PARTS, incomplete
from calib.evaluate.run_file import check_source, entry, require
from calib.evaluate.tasks import Column
from calib.runtime.files import canonical_json
from calib.runtime.files.atomic_file import write_atomically


class CellFiles:
    """The finished cells in a folder, by key.

    Attributes:
        notes: one line for each file that could not be used; its cell is measured again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []

    def read(self, key: str, column: Column) -> Result | None:
        """Returns the finished cell with this key, or None if there is no usable file."""
        path = self.folder / f"{key}.json"
        if not path.is_file():
            return None
        try:
            return checked(canonical_json.loads(path.read_bytes()), key, column)
        except (OSError, ValueError) as error:
            self.notes.append(f"the finished cell {path} cannot be used ({error}); it is measured again")
            return None

    def write(self, key: str, result: Result) -> None:
        """Writes a finished cell; raises OSError."""
        text = json.dumps({"key": key, "result": result}, indent=1, sort_keys=True, allow_nan=False)
        write_atomically(self.folder / f"{key}.json", f"{text}\n".encode())


def checked(content: object, key: str, column: Column) -> Result:
    """Returns the result in a file's `content`; raises ValueError if it is not a complete result of the cell `key`."""
    require(isinstance(content, dict) and content.get("key") == key, "it is another cell's")
    assert isinstance(content, dict)
    entry(content, "result", dict, "result")
    result = content["result"]
    wrong = incomplete(column, result)
    require(wrong is None, str(wrong))
    check_source(result, "result")
    return {part: result[part] for part in (*PARTS, "reused") if part in result}
