"""Reads cases from a local file with one JSON object a line, plain or gzipped, and checks each line as it is read."""

import gzip
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from calib.errors import UsageError
from calib.runtime.files import canonical_json
from calib.runtime.messages.printable import printable, shortened

LONGEST = 64 * 2**20  # most bytes of a line; a prompt of a million tokens takes about a tenth of them


def check_file(task: str, option: str, name: object, what: str) -> Path:
    """Returns the path of the file `name`; raises UsageError if there is none. `what` describes the expected file."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"invalid value {printable(name)} for 'tasks.{task}.{option}' (a path, of {what})")
    if not Path(name).is_file():
        raise UsageError(f"tasks.{task}.{option}: no file {printable(name)}, expected {what}")
    return Path(name)


class JsonLines:
    """The JSON objects of a file, one a line; empty lines are skipped. A file whose name ends with `.gz` is gzipped.

    Args:
        task: the task's name, for messages.
        path: path of the file.
        what: description of the expected file, for messages.
    """

    def __init__(self, task: str, path: Path, what: str) -> None:
        self.task, self.path, self.what = task, path, what

    def read(self, count: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (number of the line from 1, its object) for the first `count` objects, or for all if `count` is None.

        Raises UsageError for a file that cannot be read, a line that is no JSON object, and a file without any object.
        """
        found = False
        for found_line in islice(self._objects(), count):
            found = True
            yield found_line
        if not found:
            raise UsageError(f"tasks.{self.task}: {self._name()} has no line, expected {self.what}")

    def wrong(self, line: int, problem: str) -> UsageError:
        """Returns the error to raise for a line; `problem` says what is wrong with it."""
        return UsageError(f"tasks.{self.task}: line {line} of {self._name()} {problem}; expected {self.what}")

    def field(self, line: int, content: dict[str, Any], name: str, kind: type) -> Any:
        """Returns `content[name]`; raises UsageError if it is missing, empty or not of the type `kind`."""
        if name not in content:
            raise self.wrong(line, f"has no '{name}'")
        if type(content[name]) is not kind or content[name] in ("", []):
            words = {str: "a text", int: "a whole number", list: "a list"}[kind]
            raise self.wrong(
                line, f"has {printable(content[name])} for '{name}', {words} with something in it is needed"
            )
        return content[name]

    def _name(self) -> str:
        return printable(str(self.path))

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            with gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb") as file:
                number = 0
                while line := file.readline(LONGEST + 1):
                    number += 1
                    if len(line) > LONGEST:
                        raise self.wrong(number, f"is longer than {LONGEST:,} bytes")
                    if line.strip():
                        yield number, self._object(number, line)
        except (OSError, EOFError, zlib.error) as error:  # the last two come from gzipped files
            reason = getattr(error, "strerror", None) or shortened(str(error), 80)
            raise UsageError(
                f"tasks.{self.task}: {self._name()} cannot be read ({reason}); give another file"
            ) from error

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            content = canonical_json.loads(line)
        except ValueError as error:
            raise self.wrong(number, f"is no JSON ({shortened(str(error), 80)})") from error
        if not isinstance(content, dict):
            raise self.wrong(number, f"is {printable(content)} and no object")
        return content
