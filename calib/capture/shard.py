"""The part of a corpus that one of several machines measures: `2/8` is the second of eight shards."""

import re
from dataclasses import dataclass

from calib.errors import UsageError
from calib.runtime.messages.printable import printable

WRITTEN = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Shard:
    """Every `count`-th batch of a stage, starting with batch `number`, counted from 1.

    Attributes:
        number: 1 ... count.
        count: shards of the corpus.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "Shard":
        """Returns the shard given as text, `K/N`; raises UsageError unless K is from 1 to N."""
        found = WRITTEN.fullmatch(text)
        if found is None or int(found[1]) > int(found[2]):
            raise UsageError(
                f"shard={printable(text)}: expected K/N, K from 1 to N, such as 2/8 for the second of eight"
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Shard()
