"""Caches objects computed from the tensors of pages, such as views, which would cost more host time to make than to keep."""

from collections.abc import Callable, Hashable
from operator import is_not
from typing import Any, TypeVar

Made = TypeVar("Made")


class Derived:
    """A cache of views, numbers and tensors shared by the whole process, none of which is memory of one KV cache. It has no
    `__dict__`, so that `memory.tensors` does not count what is in it. A copy starts empty."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def once(self, name: Hashable, make: Callable[[], Made], of: tuple[Any, ...] = ()) -> Made:
        """What `make` returned when first called for this `name`; it is called again where any object in `of` is another one
        now."""
        if name not in self._made or any(map(is_not, self._made[name][0], of)):
            self._made[name] = of, make()
        found: Made = self._made[name][1]
        return found

    def clear(self) -> None:
        """Drops everything, because the tensors were replaced."""
        self._made.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Derived":
        return Derived()
