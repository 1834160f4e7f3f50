"""Launches Triton kernels. All launches go through here, so that those of a layer can be recorded and replayed."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

_here = threading.local()  # `take` of the active `LaunchedBy` of this thread


class Launch(NamedTuple):
    """A recorded launch: kernel, grid, positional arguments, and keyword options (constants, warps, stages)."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def start(self) -> None:
        """Launches the kernel with these arguments."""
        self.kernel[self.grid](*self.arguments, **self.options)


def launch(kernel: Any, grid: tuple[int, ...], /, *arguments: Any, **options: Any) -> None:
    """Launches `kernel` with a `grid` of programs, or passes the launch to the active `LaunchedBy`.

    Multiplications and additions are fused unless the launch has `enable_fp_fusion=False`. Triton's own default is no constant:
    users can change it by a variable, 3.9 warns that it will change, and unfused kernels take more instructions.
    """
    options.setdefault("enable_fp_fusion", True)
    take: Callable[[Launch], None] | None = getattr(_here, "take", None)
    if take is None:
        kernel[grid](*arguments, **options)
    else:
        take(Launch(kernel, grid, arguments, options))


class LaunchedBy:
    """Context in which this thread's launches are passed to `take` and not started."""

    def __init__(self, take: Callable[[Launch], None]) -> None:
        self.take = take

    def __enter__(self) -> None:
        self.outer = getattr(_here, "take", None)
        _here.take = self.take

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.take = self.outer
