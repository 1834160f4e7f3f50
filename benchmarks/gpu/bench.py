"""The input and the result of a measurement."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.sizes import Sizes

# Seconds after its time in which a measurement may still complete the least number of turns: compiling may have taken all of its
# time. Less than `supervise.GRACE`.
LATE = 10


class NotMeasured(Exception):
    """There is no figure; the message gives the reason in one line."""


@dataclass(frozen=True)
class Bench:
    """Device, sizes and dtype of a measurement; `until` is the time, by `time.monotonic`, after which it takes no more turns."""

    device: torch.device
    sizes: Sizes
    until: float
    dtype: torch.dtype = torch.bfloat16

    @property
    def on_gpu(self) -> bool:
        """False in a dry run on the CPU, where plain torch replaces every kernel."""
        return self.device.type == "cuda"

    @property
    def is_over(self) -> bool:
        """Whether the time of this measurement is over."""
        return time.monotonic() >= self.until

    @property
    def is_late(self) -> bool:
        """Whether its time has been over for `LATE` seconds."""
        return time.monotonic() >= self.until + LATE

    def needs_kernel(self, *operations: str) -> None:
        """Raises NotMeasured if an operation has no kernel: the time of plain torch must not count as ours."""
        missing = [name for name in operations if self.on_gpu and not has_kernel(name)]
        if missing:
            raise NotMeasured(f"no kernel: {', '.join(missing)}")


def has_kernel(operation: str) -> bool:
    """Returns whether the operation has a `triton.py`."""
    try:
        return find_spec(f"calib.kernels.{operation}.triton") is not None
    except ModuleNotFoundError:
        return False


@dataclass
class Measured:
    """The figures of a measurement by name, each as [low, median, high], and further results as `details`."""

    figures: dict[str, list[float]]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """A named measurement: its function, and the seconds that it may take."""

    name: str
    run: Callable[[Bench], Measured]
    seconds: int
