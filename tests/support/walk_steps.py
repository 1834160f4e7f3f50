"""The steps of a walk, in which a cache is compared with its oracle: forwards, drafts, and rows that are replaced by copies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One forward with `sizes` real tokens of each row, followed by a speculative token of each if `speculative`.

    With `rejected` (None: no draft) the real tokens are drafts, and as many more follow them, which `cache.crop` removes.
    Or, if `rows` is given, a call of `cache.batch_select_indices` with these row numbers.
    """

    sizes: tuple[int, ...] = ()
    speculative: bool = False
    rows: tuple[int, ...] = ()
    rejected: int | None = None


def turn(*sizes: int) -> list[Step]:
    """One forward with these numbers of tokens of each row; shorter rows are padded."""
    return [Step(sizes)]


def single(count: int, rows: int) -> list[Step]:
    """`count` decode steps of `rows` rows."""
    return [Step((1,) * rows)] * count


def speculated(count: int, rows: int, real: int = 1) -> list[Step]:
    """`count` forwards of `real` tokens and a speculative one; with real=0, the speculative token alone, as before decoding."""
    return [Step((real,) * rows, speculative=True)] * count


def drafted(*sizes: int, rejected: int = 0) -> list[Step]:
    """One forward of drafts: these numbers of each row are accepted, and `rejected` more of every row are not."""
    return [Step(sizes, rejected=rejected)]


def moved(*sources: int) -> list[Step]:
    """Row i becomes a copy of row `sources[i]`."""
    return [Step(rows=sources)]
