"""Wrong values in error messages: short, and safe to print on a terminal.

Such values come from files: they may be 50 MB long, refer to one object a thousand times (YAML aliases) or have control
characters that a terminal obeys.
"""

import reprlib
from itertools import islice
from typing import Any

LENGTH = 80  # characters of one value
DEPTH = 3  # nested lists and mappings


class _Short(reprlib.Repr):
    """A repr with limits on length and nesting; `reprlib.Repr` never walks more of a value than it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = DEPTH
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8
        self.maxstring = self.maxother = self.maxlong = LENGTH

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # In the mapping's own order, which may mean something ("best first"), and without sorting all of it.
        if level <= 0 and x:
            return "{...}"
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return f"{{{', '.join([*shown, *(['...'] if len(x) > self.maxdict else [])])}}}"

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print whole numbers of more than 4,300 digits.
        return super().repr_int(x, level) if x.bit_length() <= 1024 else f"a number of {x.bit_length()} bits"


def printable(value: object) -> str:
    """Returns `value` as `repr` writes it, in at most `LENGTH` characters and without control characters."""
    return shortened(_Short().repr(value), LENGTH)


def shortened(text: str, length: int) -> str:
    """Returns `text` in at most `length` characters, without its middle if it is longer, and without control characters."""
    # Cut before escaping, so that a long text is not walked, and again after it: an escaped character takes up to ten.
    return _cut("".join(c if c.isprintable() else _escaped(c) for c in _cut(text, length)), length)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    head = (length - 5) * 2 // 3
    return f"{text[:head]} ... {text[head + 5 - length :]}"
