"""What a cache holds, as a tree for a file: tensors and plain numbers by name, branches by name.

Whoever stores tokens has `state()`, and `restore(state)` for an empty one of the same plan. Only what was stored is in it; what
the plan says (stages, fields, pages' sizes) is not, so a file can bring nothing that the plan has no place for.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Leaves are tensors, whole numbers, texts, and lists of whole numbers (of lists of them).
State: TypeAlias = dict[str, Any]

SEPARATOR = "/"


class StateError(ValueError):
    """A state that does not fit the cache it is given to; the message says what was found and what was expected."""


def flat(state: State, path: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the other leaves of a tree, by path."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, part in state.items():
        full = f"{path}{name}"
        if isinstance(part, Tensor):
            tensors[full] = part
        elif isinstance(part, dict):
            below = flat(part, full + SEPARATOR)
            tensors |= below[0]
            numbers |= below[1]
        else:
            numbers[full] = part
    return tensors, numbers


def nested(leaves: Mapping[str, Any]) -> State:
    """The tree of leaves by path."""
    state: State = {}
    for path, leaf in leaves.items():
        *branches, name = path.split(SEPARATOR)
        at = state
        for branch in branches:
            at = at.setdefault(branch, {})
        at[name] = leaf
    return state


def part_of(state: State, name: str, kind: type[Any]) -> Any:
    """The entry `name`, of the type `kind` and no other."""
    if type(state.get(name)) is not kind:
        raise StateError(f"{name!r} is {_described(state.get(name))}, expected {kind.__name__}")
    return state[name]


def branch(state: State, name: str) -> State:
    """The branch `name`; an empty one has left nothing behind."""
    return {} if name not in state else part_of(state, name, dict)


def whole(state: State, name: str) -> int:
    """A whole number, not below 0."""
    number: int = part_of(state, name, int)
    if number < 0:
        raise StateError(f"{name!r} is {number}, expected 0 or more")
    return number


def wholes(state: State, name: str, least: int = 0) -> list[int]:
    """A list of whole numbers from `least` on."""
    numbers: list[int] = part_of(state, name, list)
    if not all(type(number) is int and number >= least for number in numbers):
        raise StateError(f"{name!r} is {_described(numbers)}, expected whole numbers from {least} on")
    return numbers


def fitting(state: State, name: str, like: Tensor, free: tuple[int, ...] = ()) -> Tensor:
    """The tensor `name` as it lies in the state; of the dtype and shape of `like`, but for the axes `free`."""
    found = state.get(name)
    if not isinstance(found, Tensor):
        raise StateError(f"{name!r} is {_described(found)}, expected a tensor")
    expected = [n if axis not in free else "any" for axis, n in enumerate(like.shape)]
    fits = len(found.shape) == len(expected) and all(
        n in ("any", have) for n, have in zip(expected, found.shape, strict=True)
    )
    if not fits or found.dtype != like.dtype:
        raise StateError(f"{name!r} is {_described(found)}, expected {like.dtype} {expected}")
    return found


def tensor_like(state: State, name: str, like: Tensor, free: tuple[int, ...] = ()) -> Tensor:
    """A copy of it where `like` is: the state's own may lie in a file."""
    return fitting(state, name, like, free).to(like.device, copy=True)


def _described(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{found.dtype} {list(found.shape)}"
    text = repr(found)
    return "absent" if found is None else text if len(text) <= 60 else f"{text[:60]} ..."


def dtype_named(name: object) -> torch.dtype:
    """The floating dtype of a name such as `bfloat16`."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise StateError(f"{name!r} is no floating dtype")
    return found


def named(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
