"""Handling of SIGTERM and SIGINT: a command saves its progress if it can, prints one line, and exits with status 143 or 130.

A signal raises `Interrupted` in the running code, as Python's own SIGINT handler raises KeyboardInterrupt. Inside `held()`, used
around the batches of a stage, the exception is delayed until the end of the batch, at most `GRACE` seconds: code there checks
`pending()`, saves and leaves. So the process ends before a scheduler kills it, 30 seconds after SIGTERM (Slurm, Kubernetes).

A second signal ends the process at once; so does a timer if a library has caught the exception.

`Interrupted` is no Exception, so no `except Exception` takes it for a failed cell or a missing package; and no KeyboardInterrupt,
which Lightning's Trainer turns into an exit status of its own.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

GRACE = 10.0  # seconds for a batch to end after a signal, and then as many for the exception to unwind
RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")  # environment variables in which launchers give a process its number


class Interrupted(BaseException):
    """Raised when SIGTERM or SIGINT asks the process to end.

    Attributes:
        number: of the signal.
        status: the exit status that a shell gives a process ended by this signal: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, number: int) -> None:
        super().__init__(name_of(number))
        self.number, self.status = number, 128 + number


class _State:
    """State of signal handling in this process; Python runs signal handlers only in its main thread."""

    received: int | None = None  # the first signal
    raised = False
    held = saving = 0  # number of contexts of each kind that are active
    resuming: tuple[str, ...] | None = None


_state = _State()


def name_of(number: int) -> str:
    """Returns a signal's name, such as SIGTERM."""
    return signal.Signals(number).name


def first_process() -> bool:
    """Returns whether this process is the one of a launcher's processes that prints messages (rank 0)."""
    return next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0"


@contextmanager
def listening() -> Iterator[None]:
    """Context in which SIGTERM and SIGINT raise `Interrupted`; signals ignored before (`nohup`, background jobs) stay ignored.

    It does nothing outside the main thread, inside another `listening`, or on systems without interval timers.
    """
    global _state
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer") or _ours():
        yield
        return
    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    }
    unraisable, _state = sys.unraisablehook, _State()
    try:
        signal.signal(signal.SIGALRM, _time_is_up)
        take_back()
        sys.unraisablehook = _once_more(unraisable)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook, _state = unraisable, _State()
        for number, handler in before.items():
            signal.signal(number, handler)


def take_back() -> None:
    """Installs the handlers of both signals again, if a library has replaced them."""
    if _ours():
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _received)


def goes_on_with(*words: str) -> None:
    """Declares that from now on this command, if interrupted, can be resumed by adding `words` to its arguments."""
    _state.resuming = words


def resuming() -> tuple[str, ...] | None:
    """Returns the arguments with which the command can be resumed; None if nothing is kept."""
    return _state.resuming


def pending() -> int | None:
    """Returns the signal that was received; None if none was."""
    return _state.received


def agreed() -> None:
    """Records that another process of this run received a signal, so that this one ends too."""
    _state.received = _state.received or signal.SIGTERM


def leave() -> NoReturn:
    """Raises `Interrupted` for the received signal."""
    assert _state.received is not None
    _state.raised = True
    _arm()
    raise Interrupted(_state.received)


@contextmanager
def held() -> Iterator[None]:
    """Context in which a signal is only recorded, for code that checks `pending()`; it is raised at the latest at the end.

    After a signal any exception that leaves the context, a library's SystemExit too, becomes `Interrupted`.
    """
    _state.held += 1
    try:
        yield
    except BaseException as error:
        if _state.received is not None and not isinstance(error, Interrupted):
            leave()
        raise
    finally:
        _state.held -= 1
    if _state.received is not None:
        leave()


@contextmanager
def saving() -> Iterator[None]:
    """Context in which a first signal is only recorded, without a time limit, so that a file can be written completely."""
    _state.saving += 1
    try:
        yield
    finally:
        _state.saving -= 1


def _ours() -> bool:
    """Returns whether a `listening` context is active."""
    return signal.getsignal(getattr(signal, "SIGALRM", signal.SIGTERM)) is _time_is_up


def _received(number: int, frame: FrameType | None) -> None:
    """The handler of both signals."""
    if _state.received is not None:
        _end(f"ended by a second {name_of(number)}", number)
    _state.received = number
    _arm()
    if not _state.held and not _state.saving:
        leave()


def _time_is_up(number: int, frame: FrameType | None) -> None:
    """The handler of the timer."""
    assert _state.received is not None
    if _state.saving:
        _arm()
    elif not _state.raised:
        leave()
    else:
        _end(f"interrupted by {name_of(_state.received)}; the work in progress did not stop in time", _state.received)


def _once_more(before: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Returns an unraisable hook that raises `Interrupted` again if Python dropped it in a destructor or callback."""

    def hook(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, Interrupted):
            before(dropped)
            return
        _state.raised = False
        _arm(0.01)

    return hook


def _arm(seconds: float | None = None) -> None:
    if _ours() and threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, GRACE if seconds is None else seconds)


def _end(line: str, number: int) -> NoReturn:
    """Writes one line and exits without flushing buffers, because the interrupted code may be inside `print`."""
    if first_process():
        os.write(2, f"calib: {line}\n".encode())
    os._exit(128 + number)
