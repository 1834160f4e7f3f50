"""The launches of one layer in a decode step, done again in later steps.

Between two encoded blocks a layer's steps launch the same kernels in the same grids with the same numbers, and most of a step's
time on the host goes into working that out. What differs are tensors: those that the layer is given, those that the first layer of
the step has worked out for all (masks, slots, lengths), and the memory that kernels fill on the way, which is allocated anew.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from calib.kernels.current_device import launching_on
from calib.kernels.launch import Launch


class Step(Protocol):
    """A forward under way."""

    readings: dict[Hashable, Any]

    @property
    def worked_out(self) -> dict[Hashable, Any]:
        """What its layers share so far: its `readings`, and the numbers that it has uploaded."""
        ...


class View(NamedTuple):
    """Part of a tensor's memory."""

    dtype: torch.dtype
    offset: int  # elements behind the tensor's first
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The part of `whole`."""
        typed = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)


class Shared(NamedTuple):
    """A tensor that a step's first layer has worked out for all: at `key`, and within what is there where `path` says."""

    key: Hashable
    path: tuple[int | str, ...]
    view: View | None

    def of(self, worked_out: dict[Hashable, Any]) -> Tensor:
        """This step's."""
        found = worked_out[self.key]
        for way in self.path:
            found = getattr(found, way) if isinstance(way, str) else found[way]
        part: Tensor = found if self.view is None else self.view.of(found)
        return part


class Memory(NamedTuple):
    """What kernels fill on the way from one to the next."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        """As much of it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class StepTensors(NamedTuple):
    """Tensors that a layer takes from the step: those that are shared, and memory, which layers fill one after the other."""

    shared: tuple[Shared, ...]
    memory: tuple[Memory, ...]

    def of(self, step: Step) -> list[Tensor] | None:
        """This step's, of which only the last are kept, no longer than the step is; None where not all are worked out yet."""
        last: tuple[StepTensors, list[Tensor]] | None = step.readings.get(StepTensors)
        if last is not None and last[0] is self:
            return last[1]
        worked_out = step.worked_out
        if any(one.key not in worked_out for one in self.shared):
            return None
        found = [*(one.of(worked_out) for one in self.shared), *(one.make() for one in self.memory)]
        step.readings[StepTensors] = self, found
        return found


class Hole(NamedTuple):
    """An argument of a launch that differs by step, and the register that it is taken from, or part of it."""

    position: int
    register: int
    view: View | None = None


class LaunchTape:
    """Launches with holes. Registers are what the layer is given, its output, and what it takes from the step, in this order."""

    def __init__(
        self,
        launches: list[tuple[Launch, list[Hole]]],
        output: tuple[Memory, View | None],
        tensors: StepTensors,
    ) -> None:
        self.launches, self.output, self.tensors = launches, output, tensors

    def run(self, given: Sequence[Tensor], step: Step) -> Tensor | None:
        """What the layer returns; None, and nothing is launched, where the step's layers have not yet worked out all it takes."""
        taken = self.tensors.of(step)
        if taken is None:
            return None
        memory, view = self.output
        output = memory.make()
        registers = [*given, output, *taken]
        with launching_on(output):
            for (kernel, grid, fixed, options), holes in self.launches:
                arguments = list(fixed)
                for position, register, part in holes:
                    arguments[position] = registers[register] if part is None else part.of(registers[register])
                kernel[grid](*arguments, **options)
        return output if view is None else view.of(output)
