"""What follows from the tensors of pages and costs the host more to work out than to keep."""

from collections.abc import Callable, Hashable
from operator import is_not
from typing import Any, TypeVar

Made = TypeVar("Made")


class Derived:
    """Views of tensors that others hold, numbers, and tensors that all caches of the process share: no memory of a cache's own, and
    without `__dict__` nothing that weighs one looks in here. A copy begins empty."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def once(self, name: Hashable, make: Callable[[], Made], of: tuple[Any, ...] = ()) -> Made:
        """What `make` gave when it was first asked for by this `name`; made again where the objects that it is made `of` are
        others."""
        if name not in self._made or any(map(is_not, self._made[name][0], of)):
            self._made[name] = of, make()
        found: Made = self._made[name][1]
        return found

    def clear(self) -> None:
        """The tensors are others."""
        self._made.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Derived":
        return Derived()
