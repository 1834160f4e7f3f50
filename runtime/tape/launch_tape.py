"""The launches of one layer in a decode step, done again in later steps.

Between two encoded blocks a layer's steps launch the same kernels in the same grids with the same numbers, and most of a step's
time on the host goes into working that out. What differs are tensors: those that the layer is given, those that the first layer of
the step has worked out for all (masks, slots, lengths), and the memory that kernels fill on the way, which is allocated anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from calib.kernels.current_device import launching_on
from calib.kernels.launch import Launch
from calib.runtime.tape.step_tensors import Memory, Step, StepTensors, TapedStep, View


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
