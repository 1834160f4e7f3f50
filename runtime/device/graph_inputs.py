"""Numbers that the host knows and a device reads: lengths, slots, page numbers."""

from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from calib.kernels.upload import upload

Forward = TypeVar("Forward")

# What the numbers of a forward are worked out by; lengths and slots of every other forward by the same function.
Numbers: TypeAlias = Callable[[Forward], list[int] | bytes]


class NotRecordableError(RuntimeError):
    """A step cannot be recorded."""


# What `array` calls the types that numbers are uploaded in.
CODES: dict[torch.dtype, Literal["q", "i", "B"]] = {torch.int64: "q", torch.int32: "i", torch.uint8: "B"}

ALIGNED = 32  # bytes: where the numbers of each name begin, as tensors of their own would


class GraphInputs(Generic[Forward]):
    """Numbers in tensors that stay where they are, so that what was recorded once reads the numbers of every later step.

    The step before tells which there are; `settle` gives them their positions in one stretch of memory, which one copy fills.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, torch.dtype, torch.device], Numbers[Forward]] = {}
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._stretches: list[_Stretch[Forward]] = []

    def tensor(
        self, name: str, numbers: Numbers[Forward], dtype: torch.dtype, device: torch.device, forward: Forward
    ) -> Tensor:
        """The numbers called `name`, `[n]`: the same tensor for all that ask, and once settled for all steps."""
        key = (name, dtype, device)
        if key not in self._tensors:
            if self._stretches:
                raise NotRecordableError(f"the numbers {name!r} were not asked for in the step before")
            self._tensors[key], self._numbers[key] = upload(numbers(forward), dtype, device), numbers
        return self._tensors[key]

    def settle(self) -> None:
        """One stretch for all numbers of a device."""
        for device in {device for _, _, device in self._tensors}:
            names = [key for key in self._tensors if key[2] == device]
            stretch = _Stretch[Forward]([self._tensors[key] for key in names], [self._numbers[key] for key in names])
            self._tensors.update(zip(names, stretch.tensors, strict=True))
            self._stretches.append(stretch)

    def feed(self, forward: Forward) -> None:
        """Works every number out for `forward`, and puts it where it is read."""
        for stretch in self._stretches:
            stretch.feed(forward)


class _Stretch(Generic[Forward]):
    """Memory of a device for the numbers of several names, and the same on the host."""

    def __init__(self, like: list[Tensor], numbers: list[Numbers[Forward]]) -> None:
        """Of the sizes and types of the tensors `like`."""
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
        """The numbers of a step, without waiting for the device."""
        for of_step, code, own in self.fed:
            own[:] = array(code, of_step(forward))
        # A copy that waits for the device's turn: the other changes with the next step.
        staged = self.on_host.pin_memory() if self.on_device.is_cuda else self.on_host
        self.on_device.copy_(staged, non_blocking=True)
