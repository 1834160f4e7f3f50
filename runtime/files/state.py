"""The state of a cache as a tree for a file: nested dicts of tensors and plain numbers by name.

Every object that stores tokens has `state()`, and `restore(state)` for an empty object of the same plan. A state has only what was
stored, not what the plan determines (stages, fields, sizes of pages), so a file cannot add anything that the plan does not have.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.messages.printable import printable

# Leaves are tensors, whole numbers, texts, and lists of whole numbers (of lists of them).
State: TypeAlias = dict[str, Any]

SEPARATOR = "/"

# The largest number of tokens, pages or entries: positions are stored in 32 bits.
MOST = 2**31 - 1

# The largest magnitude of exact tokens and parameters: far above those of models, and small enough that products of three do not
# overflow float32 (a scale times a coefficient times an entry of a low-rank vector, times a query).
LARGEST = 2.0**32

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = frozenset({*FLOATS, torch.uint8, torch.int16, torch.int32, torch.int64})


class StateError(ValueError):
    """A state that does not fit the cache it is given to; the message says what was found and what was expected."""


def flat(state: State, path: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and the other leaves of a tree, each by path."""
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


def nested(leaves: Iterable[tuple[str, Any]]) -> State:
    """Returns the tree of `leaves`, pairs (path, leaf); raises StateError if a path occurs twice or is below another leaf."""
    state: State = {}
    branches = {id(state)}  # a leaf may be a mapping itself
    for path, leaf in leaves:
        *above, name = path.split(SEPARATOR)
        at = state
        for part in above:
            if part not in at:
                at[part] = {}
                branches.add(id(at[part]))
            at = at[part]
            if id(at) not in branches:
                raise StateError(f"{printable(path)} lies below another leaf")
        if name in at:
            raise StateError(f"{printable(path)} is there twice")
        at[name] = leaf
    return state


def part_of(state: State, name: str, kind: type[Any]) -> Any:
    """Returns the entry `name`; raises StateError unless its type is exactly `kind`."""
    if type(state.get(name)) is not kind:
        raise StateError(f"{name!r} is {_described(state.get(name))}, expected {kind.__name__}")
    return state[name]


def branch(state: State, name: str) -> State:
    """Returns the branch `name`, {} if it is missing, because an empty branch leaves nothing in a file."""
    return {} if name not in state else part_of(state, name, dict)


def whole(state: State, name: str) -> int:
    """Returns the entry `name`; raises StateError unless it is a whole number from 0 to `MOST`."""
    number: int = part_of(state, name, int)
    if not 0 <= number <= MOST:
        raise StateError(f"{name!r} is {printable(number)}, expected 0 ... {MOST}")
    return number


def wholes(state: State, name: str, least: int = 0) -> list[int]:
    """Returns the entry `name`; raises StateError unless it is a list of whole numbers from `least` to `MOST`."""
    numbers: list[int] = part_of(state, name, list)
    if not all(type(number) is int and least <= number <= MOST for number in numbers):
        raise StateError(f"{name!r} is {printable(numbers)}, expected whole numbers from {least} on, at most {MOST}")
    return numbers


def fitting(state: State, name: str, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
    """Returns the tensor `name`; raises StateError unless it has this dtype and shape, where None stands for any length."""
    found = state.get(name)
    if not isinstance(found, Tensor):
        raise StateError(f"{name!r} is {_described(found)}, expected a tensor")
    fits = len(found.shape) == len(shape) and all(
        n is None or n == have for n, have in zip(shape, found.shape, strict=True)
    )
    if not fits or found.dtype != dtype:
        expected = ["any" if n is None else n for n in shape]
        raise StateError(f"{name!r} is {_described(found)}, expected {dtype} {expected}")
    return found


def tensor_like(state: State, name: str, like: Tensor, free: tuple[int, ...] = ()) -> Tensor:
    """Returns a copy of the tensor `name` on the device of `like`; it must have the dtype and shape of `like`, except for the
    length of the axes `free`. It is a copy because the state's tensor may be mapped from a file."""
    shape = [None if axis in free else n for axis, n in enumerate(like.shape)]
    return fitting(state, name, like.dtype, shape).to(like.device, copy=True)


def pages_in(state: State) -> int:
    """The largest number of pages of any tensor in a tree: the longest first axis of the tensors that are not empty."""
    tensors, _ = flat(state)
    return max((len(tensor) for tensor in tensors.values() if tensor.ndim and tensor.numel()), default=0)


def check_values(name: str, tensor: Tensor) -> None:
    """Raises StateError for a tensor whose dtype no cache holds, and for values that are not finite or beyond `LARGEST`."""
    if tensor.dtype not in DTYPES:
        raise StateError(f"{printable(name)} is {tensor.dtype}, which no cache holds")
    if tensor.is_floating_point() and tensor.numel():
        low, high = (end.item() for end in tensor.aminmax())
        if not -LARGEST <= low <= high <= LARGEST:
            raise StateError(
                f"{printable(name)} has values from {low:.4g} to {high:.4g}, expected finite ones of {LARGEST:.4g} at most"
            )


def _described(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{found.dtype} {printable(list(found.shape))}"
    return "absent" if found is None else printable(found)


def dtype_named(name: object) -> torch.dtype:
    """Returns the floating dtype of a name such as `bfloat16`; raises StateError for other names."""
    found = next((dtype for dtype in FLOATS if dtype_name(dtype) == name), None)
    if found is None:
        raise StateError(
            f"{printable(name)} is no floating dtype of a cache, expected {', '.join(map(dtype_name, FLOATS))}"
        )
    return found
