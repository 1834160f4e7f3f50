"""The sources of the tensors that a layer's kernels are given, and the tape that follows from them.

Sizes, grids and memory differ from block to block and from layer to layer, but not the source of each tensor. It is
determined once (`recording.py`); afterwards recording a layer's launches costs little more than running the layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calib.kernels.launch import Launch, LaunchedBy
from calib.runtime.tape.launch_tape import Hole, LaunchTape
from calib.runtime.tape.step_tensors import Memory, Shared, Step, StepTensors, TapedStep, View, storage_of


class KnownLaunch(NamedTuple):
    """The known part of a launch: the kernel, the types of its arguments, the indices of the layer's own tensors (`own`), and
    the sources of the other tensors (`holes`)."""

    kernel: Any
    types: tuple[type, ...]
    own: tuple[int, ...]
    holes: tuple[Hole, ...]


class UnlikeError(Exception):
    """Raised where a layer's launches differ from its outline."""


class Outline(NamedTuple):
    """The common part of the tapes of layers with equal plans, in steps that take the same way through the code. It holds no
    tensor.

    Registers are numbered as in a tape: the layer's arguments, its output, then `shared` tensors of the step, then intermediate
    `memory` with these dtypes.
    """

    launches: list[KnownLaunch]
    shared: int
    memory: tuple[torch.dtype, ...]

    def recorded(
        self, layer: Callable[[], Tensor], given: Sequence[Tensor], step: Step
    ) -> tuple[Tensor, LaunchTape | None]:
        """What `layer()` returns, and the tape of its launches; None for the tape where the layer differs from the outline."""
        shared, before, listed = TapedStep.of(step).shared(), step.worked_out.keys(), list[Launch]()

        def take(launch: Launch) -> None:
            listed.append(launch)
            launch.start()

        with LaunchedBy(take):
            output = layer()
        return output, self.tape(listed, output, given, shared) if step.worked_out.keys() == before else None

    def tape(
        self, launches: list[Launch], output: Tensor, given: Sequence[Tensor], shared: dict[int, tuple[Shared, Tensor]]
    ) -> LaunchTape | None:
        """The tape of these launches; None where they differ from the outline, or tensors come from elsewhere than
        `TapedStep.shared` and the layer's arguments."""
        if len(launches) != len(self.launches):
            return None
        found = _Registers(self, output, given, shared)
        try:
            pairs = zip(launches, self.launches, strict=True)
            return found.tape([found.emptied(launch, known) for launch, known in pairs])
        except UnlikeError:
            return None


class _Registers:
    """The values of the registers in one layer of one step."""

    def __init__(
        self, outline: Outline, output: Tensor, given: Sequence[Tensor], shared: dict[int, tuple[Shared, Tensor]]
    ) -> None:
        self.outline, self.output, self.given, self.shared = outline, output, given, shared
        self.out, self.memory = len(given), len(given) + 1 + outline.shared
        self.of_output = storage_of(output)
        self.of_step = {self.of_output, *map(storage_of, given), *shared}
        # Filled while launches are read: the shared tensors, and the storages of intermediate memory.
        self.parts: dict[int, Shared] = {}
        self.rooms: dict[int, torch.UntypedStorage] = {}

    def emptied(self, launch: Launch, known: KnownLaunch) -> tuple[Launch, list[Hole]]:
        """The launch without the tensors that differ by step, so that they are not kept alive, and its holes."""
        arguments = list(launch.arguments)
        if launch.kernel is not known.kernel or tuple(map(type, arguments)) != known.types:
            raise UnlikeError
        for position in known.own:
            if arguments[position].untyped_storage().data_ptr() in self.of_step:
                raise UnlikeError
        holes = [self._hole(arguments[hole.position], hole) for hole in known.holes]
        for hole in holes:
            arguments[hole.position] = None
        return Launch(launch.kernel, launch.grid, tuple(arguments), launch.options), holes

    def _hole(self, part: Tensor, hole: Hole) -> Hole:
        """The hole for a tensor, with the part of its register that it is."""
        register = hole.register
        if register < self.out:  # only whole arguments: several may be parts of one storage
            given = self.given[register]
            if (part.data_ptr(), part.dtype) != (given.data_ptr(), given.dtype):
                raise UnlikeError
            return hole
        if self.out < register < self.memory:
            self._read(register, part)
            return hole
        storage = part.untyped_storage()
        if register == self.out:
            if storage.data_ptr() != self.of_output:
                raise UnlikeError
            view = _view(part, self.of_output, self.output.dtype)
        else:
            held = self.rooms.setdefault(register, storage)
            if held.data_ptr() != storage.data_ptr():
                raise UnlikeError
            view = _view(part, held.data_ptr(), self.outline.memory[register - self.memory])
        return hole if view is None else Hole(hole.position, register, view)

    def _read(self, register: int, part: Tensor) -> None:
        """Records which shared tensor of the step a register is."""
        if (found := self.shared.get(storage_of(part))) is None:
            raise UnlikeError
        one, whole = found
        if (view := _view(part, whole.data_ptr(), whole.dtype)) is not None:
            one = Shared(one.key, one.path, view)
        held = self.parts.setdefault(register, one)
        if held is not one and held != one:
            raise UnlikeError

    def tape(self, launches: list[tuple[Launch, list[Hole]]]) -> LaunchTape:
        """The tape, from the output and all registers."""
        output, device, dtype = self.output, self.output.device, self.output.dtype
        count, view = output.untyped_storage().nbytes() // dtype.itemsize, _view(output, self.of_output, dtype)
        shape = output.shape
        if view is not None or count != output.numel() or not output.is_contiguous():
            view, shape = view or View(dtype, 0, shape, output.stride()), torch.Size((count,))
        parts = tuple(self.parts[number] for number in range(self.out + 1, self.memory))
        memory = []
        for number, of_room in enumerate(self.outline.memory, self.memory):
            shape_of_room = torch.Size((self.rooms[number].nbytes() // of_room.itemsize,))
            memory.append(Memory(shape_of_room, of_room, device))
        return LaunchTape(launches, (Memory(shape, dtype, device), view), StepTensors(parts, tuple(memory)))


def _view(part: Tensor, begin: int, dtype: torch.dtype) -> View | None:
    """The part of a tensor relative to the address `begin`; None where it begins there, because kernels get shapes and strides
    anyway."""
    offset = part.data_ptr() - begin
    if offset == 0 and part.dtype == dtype:
        return None
    if part.element_size() != dtype.itemsize:
        raise UnlikeError
    return View(part.dtype, offset // dtype.itemsize, part.shape, part.stride())
