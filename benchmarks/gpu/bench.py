"""What a measurement is given, and what it gives back."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.sizes import Sizes


class NotMeasured(Exception):
    """Why there is no figure, in one line."""


@dataclass(frozen=True)
class Bench:
    """Where and how large; `until` is the moment, on `time.monotonic`'s clock, at which a measurement stops repeating itself."""

    device: torch.device
    sizes: Sizes
    until: float
    dtype: torch.dtype = torch.bfloat16

    @property
    def on_gpu(self) -> bool:
        """False in a dry run, where plain torch stands for every kernel."""
        return self.device.type == "cuda"

    @property
    def is_over(self) -> bool:
        """Whether the time of this measurement is used up."""
        return time.monotonic() >= self.until

    def needs_kernel(self, *operations: str) -> None:
        """Raises NotMeasured where an operation has no kernel yet: what plain torch takes is no figure of ours."""
        missing = [name for name in operations if self.on_gpu and not has_kernel(name)]
        if missing:
            raise NotMeasured(f"no kernel: {', '.join(missing)}")


def has_kernel(operation: str) -> bool:
    """Whether the operation has a `triton.py`."""
    try:
        return find_spec(f"calib.kernels.{operation}.triton") is not None
    except ModuleNotFoundError:
        return False


@dataclass
class Measured:
    """The figures of a measurement, each with its quartiles, and everything else that was found beside them."""

    figures: dict[str, list[float]]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """A function that measures, and the seconds it may take."""

    name: str
    run: Callable[[Bench], Measured]
    seconds: int
