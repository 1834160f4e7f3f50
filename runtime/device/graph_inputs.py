"""Numbers that the host computes and a device reads, such as lengths, slots and page numbers."""

from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from calib.kernels.upload import upload

Forward = TypeVar("Forward")

# A function that computes numbers from a forward; the same function is used for every later forward.
Numbers: TypeAlias = Callable[[Forward], list[int] | bytes]


class NotRecordableError(RuntimeError):
    """Raised where a step cannot be recorded."""


# The type codes of `array` for the dtypes in which numbers are uploaded.
CODES: dict[torch.dtype, Literal["q", "i", "B"]] = {torch.int64: "q", torch.int32: "i", torch.uint8: "B"}

ALIGNED = 32  # bytes: alignment of each name's numbers, as for separate tensors


class GraphInputs(Generic[Forward]):
    """Numbers in tensors at fixed addresses, so that a recorded step reads the numbers of every later step.

    The step before the recording determines which numbers there are. `settle` puts them into one buffer per device, filled by
    one copy.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, torch.dtype, torch.device], Numbers[Forward]] = {}
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._stretches: list[_Stretch[Forward]] = []

    def tensor(
        self, name: str, numbers: Numbers[Forward], dtype: torch.dtype, device: torch.device, forward: Forward
    ) -> Tensor:
        """The numbers called `name`, `[n]`: one tensor for all callers, and after `settle` for all steps. Raises
        NotRecordableError for a name that is new after `settle`."""
        key = (name, dtype, device)
        if key not in self._tensors:
            if self._stretches:
                raise NotRecordableError(f"the step needs the input {name!r}, which the step before did not")
            self._tensors[key], self._numbers[key] = upload(numbers(forward), dtype, device), numbers
        return self._tensors[key]

    def settle(self) -> None:
        """Moves all numbers of each device into one buffer."""
        for device in {device for _, _, device in self._tensors}:
            names = [key for key in self._tensors if key[2] == device]
            stretch = _Stretch[Forward]([self._tensors[key] for key in names], [self._numbers[key] for key in names])
            self._tensors.update(zip(names, stretch.tensors, strict=True))
            self._stretches.append(stretch)

    def feed(self, forward: Forward) -> None:
        """Computes all numbers for `forward` and copies them to the device."""
        for stretch in self._stretches:
            stretch.feed(forward)


class _Stretch(Generic[Forward]):
    """A buffer on a device for the numbers of several names, and its copy on the host."""

    def __init__(self, like: list[Tensor], numbers: list[Numbers[Forward]]) -> None:
        """Allocates room for tensors with the sizes and dtypes of `like`."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        ends = list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))
        starts = [0, *ends[:-1]]
        on_host = bytearray(max(ALIGNED, ends[-1]))
        self.on_host = torch.frombuffer(on_host, dtype=torch.uint8)
        self.on_device = torch.zeros_like(self.on_host, device=like[0].device)
        self.tensors: list[Tensor] = []
        self.fed: list[tuple[Numbers[Forward], Literal["q", "i", "B"], memoryview[int]]] = []
        for tensor, of_step, start, size in zip(like, numbers, starts, sizes, strict=True):
            self.tensors.append(self.on_device[start : start + size].view(tensor.dtype))
            code = CODES[tensor.dtype]
            self.fed.append((of_step, code, memoryview(on_host)[start : start + size].cast("B").cast(code)))

    def feed(self, forward: Forward) -> None:
        """Computes and uploads the numbers of a step, without waiting for the device."""
        for of_step, code, own in self.fed:
            own[:] = array(code, of_step(forward))
        # A separate pinned copy, because the upload happens later and the buffer changes with the next step.
        staged = self.on_host.pin_memory() if self.on_device.is_cuda else self.on_host
        self.on_device.copy_(staged, non_blocking=True)
