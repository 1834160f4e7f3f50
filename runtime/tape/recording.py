"""Records a layer's first taped step, and determines the sources of the tensors that its kernels are given."""

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calib.kernels.launch import Launch, LaunchedBy
from calib.runtime.tape.launch_tape import Hole, LaunchTape
from calib.runtime.tape.outline import KnownLaunch, Outline, UnlikeError
from calib.runtime.tape.step_tensors import Step, TapedStep, storage_of

# Operators of torch that allocate memory without writing to it.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def recorded(
    layer: Callable[[], Tensor], given: Sequence[Tensor], step: Step
) -> tuple[Tensor, LaunchTape | None, Outline | None]:
    """What `layer()` returns, the tape of its launches, and their outline. Both are None where the layer does more than launch
    kernels and allocate memory: where it calls other operators of torch, or computes something for all layers."""
    shared, listed = TapedStep.of(step).shared(), _Listed()
    before = step.worked_out.keys()
    with listed, LaunchedBy(listed.take):
        output = layer()
    if listed.others or step.worked_out.keys() != before:
        return output, None, None
    outline = _Origins(output, given, shared, listed.made).outline(listed.launches)
    tape = None if outline is None else outline.tape(listed.launches, output, given, shared)
    return output, tape, None if tape is None else outline


class _Listed(TorchDispatchMode):
    """Records what happens inside: kernel launches, which are carried out, allocations, and other operators of torch except
    views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.made: list[Tensor] = []  # kept alive, so that no address is used twice
        self.others: set[str] = set()
        self._launching = False

    def take(self, launch: Launch) -> None:
        """Records a launch and carries it out; operators called within it belong to Triton's interpreter."""
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
        elif not _is_view(func) or name == "lift_fresh":  # which uploads host numbers
            self.others.add(name)
        return result


@lru_cache
def _is_view(func: Any) -> bool:
    return any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns)


class _Origins:
    """Where tensors come from, by their storage. A tensor in none of the step's storages is the layer's own."""

    def __init__(self, output: Tensor, given: Sequence[Tensor], shared: Collection[int], made: list[Tensor]) -> None:
        self.output, self.given, self.shared = storage_of(output), given, shared
        self.of_given = {storage_of(tensor) for tensor in given}
        self.made = {storage_of(tensor): tensor for tensor in made if tensor.numel()}
        # By name, in the order in which launches use them.
        self.read: dict[Hashable, None] = {}
        self.filled: dict[Hashable, Tensor] = {}

    def outline(self, launches: list[Launch]) -> Outline | None:
        """The outline of these launches; None where the source of a tensor cannot be determined."""
        if self.output not in self.made:
            return None
        try:
            found = [
                {at: self._name(part) for at, part in enumerate(launch.arguments) if isinstance(part, Tensor)}
                for launch in launches
            ]
        except UnlikeError:
            return None
        names = [*map(_of_given, range(len(self.given))), self.output, *self.read, *self.filled]
        registers: dict[Hashable, int] = {name: register for register, name in enumerate(names)}
        known = [
            KnownLaunch(
                launch.kernel,
                tuple(map(type, launch.arguments)),
                tuple(at for at, name in own.items() if name is None),
                tuple(Hole(at, registers[name]) for at, name in own.items() if name is not None),
            )
            for launch, own in zip(launches, found, strict=True)
        ]
        types = tuple(tensor.dtype for tensor in self.filled.values())
        return Outline(known, len(self.read), types)

    def _name(self, part: Tensor) -> Hashable:
        """The name of a tensor that differs by step; None for the layer's own tensors."""
        storage = storage_of(part)
        if storage in self.of_given:
            return _of_given(self._number_of_given(part))
        if storage == self.output:
            return storage
        if storage in self.made:
            self.filled.setdefault(storage, self.made[storage])
            return storage
        if storage in self.shared:
            name = (storage, part.data_ptr(), part.dtype, part.shape, part.stride())
            self.read[name] = None
            return name
        return None

    def _number_of_given(self, part: Tensor) -> int:
        for number, tensor in enumerate(self.given):
            if (tensor.data_ptr(), tensor.dtype) == (part.data_ptr(), part.dtype):
                return number
        raise UnlikeError  # a part of an argument; several arguments may share one storage


def _of_given(number: int) -> Hashable:
    return "given", number
