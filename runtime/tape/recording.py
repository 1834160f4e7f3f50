"""Lists what a layer does in a step, and finds out where the tensors come from that its kernels are given."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calib.kernels.launch import Launch, LaunchedBy
from calib.runtime.tape.launch_tape import Hole, LaunchTape, Memory, Shared, Step, StepTensors, View

# Torch's operators that make memory and put nothing into it.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def recorded(layer: Callable[[], Tensor], given: Sequence[Tensor], step: Step) -> tuple[Tensor, LaunchTape | None]:
    """What `layer()` returns, and its launches. None where it does more than to launch kernels and allocate memory: torch's own
    operators, or work for all layers, which adds to what is worked out."""
    shared, listed = _shared_in(step), _Listed()
    before = step.worked_out.keys()
    with listed, LaunchedBy(listed.take):
        output = layer()
    if listed.others or step.worked_out.keys() != before:
        return output, None
    return output, _Sources(given, shared, listed.made).tape(listed.launches, output)


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


@lru_cache
def _is_view(func: Any) -> bool:
    return any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns)


# Where a step has a tensor, and the tensor.
_Known = tuple[Hashable, tuple[int | str, ...], Tensor]


class _UnknownError(Exception):
    """It cannot be said where a tensor comes from."""


class _Sources:
    """Where the tensors of a step come from, by the memory that they lie in."""

    def __init__(self, given: Sequence[Tensor], shared: "dict[int, _Known]", made: list[Tensor]) -> None:
        self.given, self.shared = given, shared
        self.of_given = {_storage(tensor) for tensor in given}
        self.made = {_storage(tensor): tensor for tensor in made if tensor.numel()}

    def tape(self, launches: list[Launch], output: Tensor) -> LaunchTape | None:
        """None where the source of a tensor is not known."""
        out = self.made.pop(_storage(output), None)
        if out is None:
            return None
        self.out, self.of_out = out, _storage(out)
        self.taken: dict[tuple[int, View | None], Shared | Memory] = {}
        try:
            view, holes = _view(output, out), [self._holes(launch) for launch in launches]
        except _UnknownError:
            return None
        if view is None and output.shape != out.shape:
            view = View(output.dtype, 0, output.shape, output.stride())
        shared = {name: part for name, part in self.taken.items() if isinstance(part, Shared)}
        memory = {name: part for name, part in self.taken.items() if isinstance(part, Memory)}
        numbers = {name: number for number, name in enumerate([*shared, *memory], len(self.given) + 1)}
        return LaunchTape(
            [
                _emptied(launch, [hole if isinstance(hole, Hole) else hole.numbered(numbers) for hole in own])
                for launch, own in zip(launches, holes, strict=True)
            ],
            (_memory(out), view),
            StepTensors(tuple(shared.values()), tuple(memory.values())),
        )

    def _holes(self, launch: Launch) -> list["Hole | _Taken"]:
        """Arguments that differ by step."""
        found = [
            self._hole(position, part) for position, part in enumerate(launch.arguments) if isinstance(part, Tensor)
        ]
        return [hole for hole in found if hole is not None]

    def _hole(self, position: int, part: Tensor) -> "Hole | _Taken | None":
        """None for a tensor that stays: the layer's own."""
        storage = _storage(part)
        if storage in self.of_given:
            return Hole(position, self._number_of_given(part))
        if storage == self.of_out:
            return Hole(position, len(self.given), _view(part, self.out))
        if storage in self.made:
            whole = self.made[storage]
            if (storage, None) not in self.taken:
                self.taken[storage, None] = _memory(whole)
            return _Taken(position, (storage, None), _view(part, whole))
        if storage in self.shared:
            key, path, whole = self.shared[storage]
            view = _view(part, whole)
            if (storage, view) not in self.taken:
                self.taken[storage, view] = Shared(key, path, view)
            return _Taken(position, (storage, view))
        return None

    def _number_of_given(self, part: Tensor) -> int:
        for number, tensor in enumerate(self.given):
            if (tensor.data_ptr(), tensor.dtype) == (part.data_ptr(), part.dtype):
                return number
        raise _UnknownError  # a piece, perhaps of several that lie in the same memory


class _Taken(NamedTuple):
    """A hole for what is taken from the step, whose registers are numbered once all are known."""

    position: int
    name: tuple[int, View | None]
    view: View | None = None

    def numbered(self, numbers: dict[tuple[int, View | None], int]) -> Hole:
        """The hole."""
        return Hole(self.position, numbers[self.name], self.view)


def _emptied(launch: Launch, holes: list[Hole]) -> tuple[Launch, list[Hole]]:
    """The launch without what differs by step: nothing keeps these tensors until the next."""
    arguments = list(launch.arguments)
    for hole in holes:
        arguments[hole.position] = None
    return launch._replace(arguments=tuple(arguments)), holes


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


def _shared_in(step: Step) -> dict[int, _Known]:
    """By their memory the tensors that a step has worked out; found once for all layers, until it has more."""
    worked_out, (count, found) = step.worked_out, step.readings.get(_Known, (0, {}))
    if count != len(worked_out):
        found = {}
        for key, value in worked_out.items():
            for path, tensor in () if key in (_Known, StepTensors) else _tensors(value):
                if tensor.numel():
                    found.setdefault(_storage(tensor), (key, path, tensor))
        step.readings[_Known] = len(worked_out) + (_Known not in worked_out), found
    return found


def _tensors(value: Any) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    """The tensors in what a step has worked out, and how they are reached."""
    if isinstance(value, Tensor):
        yield (), value
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from (((number, *path), tensor) for path, tensor in _tensors(part))
    elif is_dataclass(value) and not isinstance(value, type):
        for name, part in vars(value).items():
            yield from (((name, *path), tensor) for path, tensor in _tensors(part))
