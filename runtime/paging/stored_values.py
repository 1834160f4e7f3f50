"""Which integers are valid in a field of a page, for fields in which not every bit pattern is. Checked when a file is read,
because its content is untrusted.

Attention gathers by stored indices without a bounds check: an index out of range is an exception on a CPU, and reads foreign
memory on a GPU.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, int16

from calib.kernels.pack.reference import unpack_bytes

ROWS = 2**20  # numbers checked at once


class StoredValues(Protocol):
    """The valid values of a field."""

    def wrong(self, stored: Tensor) -> str | None:
        """Returns what is wrong with `stored [..., width]`, as the end of a message, or None."""
        ...


@dataclass(frozen=True)
class Indices:
    """Integers in 0 ... `below` - 1; int16 is unsigned. With `bits`, rows of `count` integers packed by `pack_bytes`."""

    below: int
    bits: int | None = None
    count: int = 0

    def wrong(self, stored: Tensor) -> str | None:
        """Names the largest index if it is too large, else the smallest if it is negative."""
        if not stored.numel() or (self.bits is not None and self.below == 2**self.bits):
            return None
        least, most = 0, 0
        for part in stored.flatten(0, -2).split(max(1, ROWS // stored.shape[-1])):
            index = part if self.bits is None else unpack_bytes(part, self.bits, self.count)
            index = index.int() & 0xFFFF if index.dtype == int16 else index
            ends = (int(end) for end in index.aminmax())
            least, most = min(least, next(ends)), max(most, next(ends))
        if least >= 0 and most < self.below:
            return None
        return f"holds the index {most if most >= self.below else least}, expected 0 ... {self.below - 1}"


@dataclass(frozen=True)
class Cells:
    """A channel less than `channels` and one of `span` tokens in one number, channel * span + token; int16 is unsigned."""

    channels: int
    span: int

    def wrong(self, stored: Tensor) -> str | None:
        """Names the largest channel if it is too large."""
        return Indices(self.channels).wrong((stored.int() & 0xFFFF) // self.span)


@dataclass(frozen=True)
class Float8:
    """float8 e4m3 numbers as bytes."""

    def wrong(self, stored: Tensor) -> str | None:
        """Reports NaN, the only invalid number."""
        return "holds float8 numbers that are NaN" if bool(((stored & 0x7F) == 0x7F).any()) else None
