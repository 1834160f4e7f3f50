"""The kernel launches of one layer in a decode step, repeated in later steps.

Between two encodings a layer's steps launch the same kernels with the same grids and numbers, and most of a step's host time is
spent on computing these. Only tensors differ: those passed to the layer, those that the step's first layer computes for all
(masks, slots, lengths), and intermediate memory, which is allocated anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from calib.kernels.current_device import launching_on
from calib.kernels.launch import Launch
from calib.runtime.tape.step_tensors import Memory, Step, StepTensors, TapedStep, View


class Hole(NamedTuple):
    """A tensor argument of a launch that differs by step: its index, and the register (or the part of it) that supplies it."""

    position: int
    register: int
    view: View | None = None


class LaunchTape:
    """Launches with holes. The registers are, in this order, the layer's arguments, its output, and the tensors from the step."""

    def __init__(
        self,
        launches: list[tuple[Launch, list[Hole]]],
        output: tuple[Memory, View | None],
        tensors: StepTensors,
    ) -> None:
        self.launches, self.output, self.tensors = launches, output, tensors

    def run(self, given: Sequence[Tensor], step: Step) -> Tensor | None:
        """What the layer returns. None, without any launch, if the step has not yet computed all shared tensors that are needed."""
        taken = TapedStep.of(step).take(self.tensors)
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
