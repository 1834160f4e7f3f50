"""Measures how busy other processes keep the processors during a timing, to judge how far the timing can be trusted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The first line of this file: jiffies of all processors, `cpu user nice system idle iowait irq softirq steal ...` (proc(5)).
COUNTERS = Path("/proc/stat")
IDLE = slice(3, 5)  # idle and iowait
COUNTED = 8  # the later fields (guest times) are contained in the earlier ones
BUSY = 0.15  # share of the processors above which the plan mentions other processes


@dataclass
class Neighbours:
    """`share` is the share of the processors' time that other processes used; None if the system does not report it."""

    share: float | None = None

    @property
    def busy(self) -> bool:
        """Whether other processes used more than `BUSY` of the processors."""
        return self.share is not None and self.share > BUSY


@contextmanager
def watched() -> Iterator[Neighbours]:
    """Context manager: the `share` of the yielded object is set when the block ends."""
    found, before, own = Neighbours(), jiffies(), own_seconds()
    yield found
    after, mine = jiffies(), own_seconds() - own
    if before is None or after is None or after[0] <= before[0]:
        return
    every, busy = (now - then for now, then in zip(after, before, strict=True))
    found.share = min(1.0, max(0.0, (busy - mine * os.sysconf("SC_CLK_TCK")) / every))


def jiffies() -> tuple[int, int] | None:
    """Returns the jiffies of all processors since boot, in total and busy; None if they cannot be read."""
    try:
        numbers = [int(word) for word in COUNTERS.read_text(encoding="ascii").splitlines()[0].split()[1:]][:COUNTED]
    except (OSError, ValueError, IndexError):
        return None
    return sum(numbers), sum(numbers) - sum(numbers[IDLE])


def own_seconds() -> float:
    """Processor seconds of this process and of those it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
