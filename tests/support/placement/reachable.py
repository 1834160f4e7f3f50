"""Finds every tensor that is reachable from an object, with its path."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def tensors_of(thing: Any, name: str = "cache", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of all tensors reachable by attributes, mappings and sequences; each object once."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, str | int | float | bool | type | nn.Module) or thing is None:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield name, thing
        return
    if isinstance(thing, Mapping):
        inside = [(f"{name}[{key!r}]", value) for key, value in thing.items()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inside = [(f"{name}[{number}]", value) for number, value in enumerate(thing)]
    else:
        slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
        own = {slot: getattr(thing, slot, None) for slot in slots if isinstance(slot, str)} | getattr(
            thing, "__dict__", {}
        )
        inside = [(f"{name}.{key}", value) for key, value in own.items() if not callable(value) or key == "store"]
    for path, value in inside:
        yield from tensors_of(value, path, seen)
