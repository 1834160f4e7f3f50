"""Starts Triton's kernels, all of them, so that what a layer launches can be listed and launched again."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

_here = threading.local()  # who launches in this thread, where that is not `launch`


class Launch(NamedTuple):
    """A kernel, its programs, and all that it is given: by position, and by name what it is compiled for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def start(self) -> None:
        """Launches it."""
        self.kernel[self.grid](*self.arguments, **self.options)


def launch(kernel: Any, grid: tuple[int, ...], /, *arguments: Any, **options: Any) -> None:
    """Starts `kernel` in a `grid` of programs."""
    take: Callable[[Launch], None] | None = getattr(_here, "take", None)
    if take is None:
        kernel[grid](*arguments, **options)
    else:
        take(Launch(kernel, grid, arguments, options))


class LaunchedBy:
    """Within it `take` starts this thread's launches."""

    def __init__(self, take: Callable[[Launch], None]) -> None:
        self.take = take

    def __enter__(self) -> None:
        self.outer = getattr(_here, "take", None)
        _here.take = self.take

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.take = self.outer
