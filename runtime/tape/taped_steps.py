"""Groups decode steps into blocks with equal launches, and keeps the tapes of their layers.

The first step of a block runs normally. From the second on, shapes are those of the whole block: every layer after the first is
recorded once and launched from its tape in all further steps. After a block in which tapes were used, the next block is
recorded from its first step on.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from calib.runtime.tape.launch_tape import LaunchTape
from calib.runtime.tape.outline import Outline
from calib.runtime.tape.recording import recorded
from calib.runtime.tape.step_tensors import Step, StepTensors
from calib.runtime.tape.structure import structure

# What tensors must have in common to be passed to the same launches: shape, strides, dtype and device of each.
_Form = tuple[tuple[Any, ...], ...]


class TapedSteps:
    """The tapes of one cache's layers, for the block of its last step."""

    def __init__(self) -> None:
        self.step = 0
        self.key: Hashable | None = None
        self.goes_on = False  # whether this step continues the last one's block
        self.launched = 0  # how many layers' steps tapes have launched so far
        self._before = 0  # how many of them before this block
        self._pays = False  # whether tapes launched any layer in the last block
        self._tapes: dict[Hashable, tuple[_Form, LaunchTape | None]] = {}
        self._outlines: dict[Hashable, Outline] = {}
        self._alike: dict[StepTensors, StepTensors] = {}  # the first of equal ones
        self._kinds: dict[int, tuple[Any, int]] = {}
        self._structures: dict[Hashable, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "TapedSteps":
        """A copy has no tapes: they refer to the memory of one cache."""
        return TapedSteps()

    def forget(self) -> None:
        """Ends the block and drops its tapes: memory has moved, rows have changed, or the block is over."""
        if self.key is not None:
            self._pays, self._before = self.launched > self._before, self.launched
        self.key = None
        self._tapes.clear()
        self._alike.clear()

    def begin(self, step: int, key: Hashable | None, encodes: bool = False) -> bool:
        """Starts the forward number `step`; returns whether its layers are recorded or run by tapes. All steps of a block have
        the same `key`; None marks any other forward. A step that `encodes` runs normally, and its block continues afterwards."""
        self.goes_on = key is not None and key == self.key and step == self.step + 1
        if not self.goes_on:
            self.forget()
        self.step = step
        if encodes:
            self.key, self.goes_on = key if self.goes_on else None, False
            return False
        self.key = key
        return self.goes_on or (key is not None and self._pays)

    def run(
        self, number: int, plan: Any, way: Hashable, layer: Callable[[], Tensor], given: Sequence[Tensor], step: Step
    ) -> Tensor:
        """What `layer()` returns in a `step`: by its tape where there is one, else by a call, which is recorded if it is the
        first.

        The layer has this `number` and `plan`, and takes this `way` through its code (a hashable key). `given` are the layer's
        own tensor arguments, which differ by step.
        """
        name, form = (number, way), tuple([(part.shape, part.stride(), part.dtype, part.device) for part in given])
        if name not in self._tapes:
            return self._record(name, form, (self._kind(number, plan), way), layer, given, step)
        recorded_form, tape = self._tapes[name]
        launched = tape.run(given, step) if tape is not None and form == recorded_form else None
        if launched is None:
            return layer()
        self.launched += 1
        return launched

    def _record(
        self,
        name: Hashable,
        form: _Form,
        kind: Hashable,
        layer: Callable[[], Tensor],
        given: Sequence[Tensor],
        step: Step,
    ) -> Tensor:
        """Records by the outline of layers of this `kind` where there is one; a layer that differs is recorded in full in its
        next step."""
        outline = self._outlines.pop(kind, None)
        if outline is None:
            output, tape, outline = recorded(layer, given, step)
        else:
            output, tape = outline.recorded(layer, given, step)
            if tape is None:
                return output
        if tape is not None and outline is not None:
            tape.tensors = self._alike.setdefault(tape.tensors, tape.tensors)
            self._outlines[kind] = outline
        self._tapes[name] = form, tape
        return output

    def _kind(self, number: int, plan: Any) -> int:
        """A number for the structure of the layer's plan, equal for equal structures."""
        known = self._kinds.get(number)
        if known is None or known[0] is not plan:
            of_structure = self._structures.setdefault(structure(plan), len(self._structures))
            known = self._kinds[number] = plan, of_structure
        return known[1]
