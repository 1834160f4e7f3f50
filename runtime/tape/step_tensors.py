"""Tensors that the layers of a step share: those that the first layer computes for all, and memory that each layer overwrites."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Step(Protocol):
    """The current forward, as far as tapes use it."""

    readings: dict[Hashable, Any]

    @property
    def worked_out(self) -> dict[Hashable, Any]:
        """All that its layers share so far: its `readings`, and the numbers that it has uploaded."""
        ...


class View(NamedTuple):
    """Part of a tensor's memory: `offset` elements from its first, with another dtype, shape and strides."""

    dtype: torch.dtype
    offset: int  # in elements, from the tensor's first
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """This part of `whole`."""
        typed = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)


class Shared(NamedTuple):
    """A tensor that a step's first layer computes for all: reached from the step's entry at `key` by `path`."""

    key: Hashable
    path: tuple[int | str, ...]
    view: View | None = None

    def of(self, worked_out: dict[Hashable, Any]) -> Tensor:
        """The tensor in this step."""
        found = worked_out[self.key]
        for way in self.path:
            found = getattr(found, way) if isinstance(way, str) else found[way]
        part: Tensor = found if self.view is None else self.view.of(found)
        return part


class Memory(NamedTuple):
    """Intermediate memory that kernels of a layer write and read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        """Allocates it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class StepTensors(NamedTuple):
    """The tensors that a layer takes from the step: shared ones, and intermediate memory, which the layers use one after the
    other."""

    shared: tuple[Shared, ...]
    memory: tuple[Memory, ...]


class TapedStep:
    """The state of tapes in one step; it lives as long as the step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._seen, self._shared = 0, dict[int, tuple[Shared, Tensor]]()
        self._taken: dict[int, list[Tensor]] = {}
        self._memory: list[Tensor] = []

    @classmethod
    def of(cls, step: Step) -> "TapedStep":
        """The state of a step, created at the first call."""
        found: TapedStep = step.readings.get("taped") or step.readings.setdefault("taped", cls(step))
        return found

    def shared(self) -> dict[int, tuple[Shared, Tensor]]:
        """The tensors that the step has computed, by storage address; searched once for all layers, until there are more."""
        worked_out = self._step.worked_out
        if self._seen != len(worked_out):
            self._seen, self._shared = len(worked_out), {}
            for key, value in worked_out.items():
                for path, tensor in _tensors(value):
                    if tensor.numel():
                        self._shared.setdefault(storage_of(tensor), (Shared(key, path), tensor))
        return self._shared

    def take(self, tensors: StepTensors) -> list[Tensor] | None:
        """This step's tensors for `tensors`; None where not all are computed yet."""
        found = self._taken.get(id(tensors))
        if found is None:
            worked_out = self._step.worked_out
            if any(one.key not in worked_out for one in tensors.shared):
                return None
            found = [one.of(worked_out) for one in tensors.shared]
            found += [self._room(number, one) for number, one in enumerate(tensors.memory)]
            self._taken[id(tensors)] = found
        return found

    def _room(self, number: int, wanted: Memory) -> Tensor:
        """Memory that all layers share, at least as large as `wanted`."""
        if number == len(self._memory):
            self._memory.append(wanted.make())
        held = self._memory[number]
        if (held.dtype, held.device) != (wanted.dtype, wanted.device) or held.numel() < wanted.shape.numel():
            held = self._memory[number] = wanted.make()
        return held


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


# Types without tensors, which most list entries have.
_NUMBERS = frozenset({int, float, bool, bytes, str, type(None), range})


def _tensors(value: Any) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    """The tensors in a value that a step has computed, each with its path."""
    if isinstance(value, Tensor):
        yield (), value
        return
    parts: Iterable[tuple[int | str, Any]] = ()
    if isinstance(value, tuple | list):
        parts = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).items()
    for name, part in parts:
        if type(part) not in _NUMBERS:
            for path, tensor in _tensors(part):
                yield (name, *path), tensor
