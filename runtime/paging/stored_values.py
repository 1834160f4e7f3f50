"""What integers of a page mean where not every bit pattern does: asked of what comes out of a file, which anybody may have written.

Attention gathers by stored indices without looking at them: beyond its table an index is an exception on a CPU, and on a GPU it
reads what lies there.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, int16

from calib.kernels.pack.reference import unpack_bytes

ROWS = 2**20  # indices unpacked at once


class StoredValues(Protocol):
    """Which values a field may hold."""

    def wrong(self, stored: Tensor) -> str | None:
        """What is wrong with `stored [..., width]`, or None."""
        ...


@dataclass(frozen=True)
class Indices:
    """Whole numbers less than `below`; int16 without a sign. `count` of them in `bits` bits each where `pack_bytes` packed them."""

    below: int
    bits: int | None = None
    count: int = 0

    def wrong(self, stored: Tensor) -> str | None:
        """The largest index, where it is too large, or the least, where it is negative."""
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
    """A channel less than `channels` and one of `span` tokens together, channel * span + token; int16 without a sign."""

    channels: int
    span: int

    def wrong(self, stored: Tensor) -> str | None:
        """The largest channel, where it is too large."""
        return Indices(self.channels).wrong((stored.int() & 0xFFFF) // self.span)


@dataclass(frozen=True)
class Float8:
    """Bytes of e4m3 numbers."""

    def wrong(self, stored: Tensor) -> str | None:
        """Whether any is the one that is none."""
        return "holds float8 numbers that are NaN" if bool(((stored & 0x7F) == 0x7F).any()) else None
