"""Parses and formats sizes of memory."""

import re

from calib.errors import UsageError
from calib.runtime.messages.printable import printable

LETTERS = "KMGT"
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B", re.IGNORECASE)


def parse_size(text: object, key: str) -> int:
    """Returns the bytes of "24GiB" (powers of 1024), "512MB" (powers of 1000), "4096B" or a plain number of bytes.

    Raises UsageError that names `key` for anything else, and for sizes below 1 byte.
    """
    found = SIZE.fullmatch(f"{text}B" if type(text) is int else str(text).strip())
    size = 0
    if found:
        number, letter, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** (LETTERS.index(letter.upper()) + 1 if letter else 0))
    if size < 1:
        raise UsageError(
            f"invalid value {printable(text)} for '{key}' (expected a size such as 24GiB, 512MB or a number of bytes)"
        )
    return size


def spoken_size(size: float) -> str:
    """Formats a size as "1.50 GiB", in the largest binary unit of which there is at least one."""
    power = 0
    while abs(size) >= 1024 and power < len(LETTERS):
        size, power = size / 1024, power + 1
    return f"{size:.2f} {LETTERS[power - 1]}iB" if power else f"{size:.0f} B"
