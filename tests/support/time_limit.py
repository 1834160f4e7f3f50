"""A time limit for a part of a test, so that code that never ends fails."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Wall-clock limit as a multiple of the limit of processor time: code that waits takes no processor time, and a machine may be busy.
WAITING = 20


class TookTooLong(BaseException):
    """The time limit was exceeded; a BaseException, so that `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context in which `TookTooLong` is raised after `seconds` of processor time, or WAITING times as long by the clock.

    It is raised in the main thread, between two Python instructions.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"{seconds} s are over")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, seconds * WAITING))
    before = {number: signal.signal(number, stop) for number, _, _ in timers}
    for _, timer, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, timer, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
