"""Which decode steps are alike, and the tapes of their layers.

The first step of a block runs as always. From the second on shapes are those of the whole block, and every layer behind the first
is recorded the first time and launched from its tape in all further steps.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from calib.runtime.tape.launch_tape import LaunchTape, Step, StepTensors
from calib.runtime.tape.recording import recorded

# What tensors have to share to be given to the same launches: shape, strides, type and device of each.
_Form = tuple[tuple[Any, ...], ...]


class TapedSteps:
    """The tapes of one cache's layers, for the block that its last step belongs to."""

    def __init__(self) -> None:
        self.step = 0
        self.key: Hashable | None = None
        self.launched = 0  # layers' steps so far that a tape has launched
        self._tapes: dict[Hashable, tuple[_Form, LaunchTape | None]] = {}
        self._alike: dict[StepTensors, StepTensors] = {}  # the first of those that are equal

    def __deepcopy__(self, memo: dict[int, Any]) -> "TapedSteps":
        """Tapes name the memory of one cache; a copy has none yet."""
        return TapedSteps()

    def forget(self) -> None:
        """What was recorded no longer holds: memory has moved, or rows have changed."""
        self.key = None
        self._tapes.clear()
        self._alike.clear()

    def begin(self, step: int, key: Hashable | None) -> bool:
        """Whether the forward number `step`, which shares `key` with all steps of its block, goes on with the block of the step
        before. A `key` of None is that of a forward that is no such step."""
        goes_on = key is not None and key == self.key and step == self.step + 1
        if not goes_on:
            self.forget()
        self.step, self.key = step, key
        return goes_on

    def run(self, name: Hashable, layer: Callable[[], Tensor], given: Sequence[Tensor], step: Step) -> Tensor:
        """What `layer()` returns in a `step`, by its tape where there is one of this `name`; else by a call, recorded if it is the
        first. `given` are the tensors that are the layer's own and differ by step."""
        form = tuple([(part.shape, part.stride(), part.dtype, part.device) for part in given])
        if name not in self._tapes:
            output, tape = recorded(layer, given, step)
            if tape is not None:
                tape.tensors = self._alike.setdefault(tape.tensors, tape.tensors)
            self._tapes[name] = form, tape
            return output
        recorded_form, tape = self._tapes[name]
        launched = tape.run(given, step) if tape is not None and form == recorded_form else None
        if launched is None:
            return layer()
        self.launched += 1
        return launched
