"""Lists what a layer does in a step, and finds out where the tensors come from that its kernels are given."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calib.kernels.launch import Launch, LaunchedBy
from calib.runtime.tape.launch_tape import Hole, LaunchTape, Memory, Shared, Step, StepTensors, View

# Torch's operators that make memory and put nothing into it.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def recorded(layer: Callable[[], Tensor], given: Sequence[Tensor], step: Step) -> tuple[Tensor, LaunchTape | None]:
    """What `layer()` returns, and its launches. None where it does more than to launch kernels and allocate memory: torch's own
    operators, or work for all layers, which adds to what is worked out."""
    before = step.worked_out
    listed = _Listed()
    with listed, LaunchedBy(listed.take):
        output = layer()
    if listed.others or step.worked_out.keys() != before.keys():
        return output, None
    return output, _Sources(given, before, listed.made).tape(listed.launches, output)


class _Listed(TorchDispatchMode):
    """What happens inside: launches, which are done, memory that is made, and other operators of torch but for views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.made: list[Tensor] = []  # kept: no address comes twice
        self.others: set[str] = set()
        self._launching = False

    def take(self, launch: Launch) -> None:
        """Lists a launch and does it; operators within are the interpreter's."""
        self.launches.append(launch)
        self._launching = True
        try:
            launch.start()
        finally:
            self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        if self._launching:
            return result
        if name in ALLOCATIONS and result.is_contiguous():
            self.made.append(result)
        elif not _is_view(func) or name == "lift_fresh":  # which brings numbers of the host
            self.others.add(name)
        return result


def _is_view(func: Any) -> bool:
    return any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns)


class _UnknownError(Exception):
    """It cannot be said where a tensor comes from."""


class _Sources:
    """Where the tensors of a step come from, by the memory that they lie in."""

    def __init__(self, given: Sequence[Tensor], worked_out: dict[Hashable, Any], made: list[Tensor]) -> None:
        self.given = given
        self.of_given = {_storage(tensor) for tensor in given}
        self.shared: dict[int, tuple[Hashable, tuple[int | str, ...], Tensor]] = {}
        for key, value in worked_out.items():
            if key is StepTensors:  # what other layers' tapes take from the step, under its own name besides
                continue
            for path, tensor in _tensors(value):
                self.shared.setdefault(_storage(tensor), (key, path, tensor))
        self.made = {_storage(tensor): tensor for tensor in made if tensor.numel()}

    def tape(self, launches: list[Launch], output: Tensor) -> LaunchTape | None:
        """None where the source of a tensor is not known."""
        out = self.made.pop(_storage(output), None)
        if out is None:
            return None
        view = _view(output, out)
        if view is None and output.shape != out.shape:
            view = View(output.dtype, 0, output.shape, output.stride())
        # Registers by number, as they are met: for each what is shared, or memory.
        taken: list[Shared | Tensor] = []
        try:
            found = [(launch, self._holes(launch, out, taken)) for launch in launches]
        except _UnknownError:
            return None
        first = len(self.given) + 1
        order = sorted(range(len(taken)), key=lambda number: isinstance(taken[number], Tensor))
        new = {first + old: first + number for number, old in enumerate(order)}
        shared = tuple(part for part in taken if isinstance(part, Shared))
        memory = tuple(_memory(part) for part in taken if isinstance(part, Tensor))
        return LaunchTape(
            [
                _emptied(launch, [hole._replace(register=new.get(hole.register, hole.register)) for hole in holes])
                for launch, holes in found
            ],
            (_memory(out), view),
            StepTensors(shared, memory),
        )

    def _holes(self, launch: Launch, out: Tensor, taken: list[Shared | Tensor]) -> list[Hole]:
        """Of a launch, adding to the registers."""
        holes = []
        for position, part in enumerate(launch.arguments):
            if not isinstance(part, Tensor):
                continue
            storage, count = _storage(part), len(self.given)
            if storage in self.of_given:
                holes.append(Hole(position, self._number_of_given(part)))
            elif storage == _storage(out):
                holes.append(Hole(position, count, _view(part, out)))
            elif storage in self.made:
                whole = self.made[storage]
                holes.append(Hole(position, count + 1 + _number(whole, taken), _view(part, whole)))
            elif storage in self.shared:
                key, path, whole = self.shared[storage]
                holes.append(Hole(position, count + 1 + _number(Shared(key, path, _view(part, whole)), taken)))
        return holes

    def _number_of_given(self, part: Tensor) -> int:
        for number, tensor in enumerate(self.given):
            if (tensor.data_ptr(), tensor.dtype) == (part.data_ptr(), part.dtype):
                return number
        raise _UnknownError  # a piece, perhaps of several that lie in the same memory


def _emptied(launch: Launch, holes: list[Hole]) -> tuple[Launch, list[Hole]]:
    """The launch without what differs by step: nothing keeps these tensors until the next."""
    arguments = list(launch.arguments)
    for hole in holes:
        arguments[hole.position] = None
    return launch._replace(arguments=tuple(arguments)), holes


def _number(wanted: Shared | Tensor, taken: list[Shared | Tensor]) -> int:
    """Of a register, which is new where it is not there."""
    for number, one in enumerate(taken):
        if one is wanted or (isinstance(one, Shared) and one == wanted):
            return number
    taken.append(wanted)
    return len(taken) - 1


def _view(part: Tensor, whole: Tensor) -> View | None:
    """How `part` lies in the memory of `whole`. None where it begins with it: a kernel is told shapes and strides besides."""
    offset = part.data_ptr() - whole.data_ptr()
    if offset == 0 and part.dtype == whole.dtype:
        return None
    if part.element_size() != whole.element_size():
        raise _UnknownError
    return View(part.dtype, offset // part.element_size(), part.shape, part.stride())


def _memory(tensor: Tensor) -> Memory:
    return Memory(tensor.shape, tensor.dtype, tensor.device)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    """The tensors in what a step has worked out, and how they are reached."""
    if isinstance(value, Tensor):
        yield (), value
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from (((number, *path), tensor) for path, tensor in _tensors(part))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from (((field.name, *path), tensor) for path, tensor in _tensors(getattr(value, field.name)))
