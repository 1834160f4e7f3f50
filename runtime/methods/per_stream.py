"""An option that may differ between keys and values: `bits=4` for both, or `bits={"keys": 4, "values": 2}`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from calib.runtime.messages.printable import printable

STREAMS = ("keys", "values")

T = TypeVar("T", covariant=True)
U = TypeVar("U")


@dataclass(frozen=True, repr=False)
class PerStream(Generic[T]):
    """An option's value for keys and its value for values; unpacks as `keys, values = option`.

    It is hashable, so that a dataclass field can have it as its default; its repr is the mapping that a user writes.
    """

    keys: T
    values: T

    def of(self, role: str) -> T:
        """Returns the value for `role`, "keys" or "values"."""
        return dict(zip(STREAMS, self, strict=True))[role]

    def map(self, change: Callable[[T], U]) -> "PerStream[U]":
        """Returns the same with `change` applied to both values."""
        return PerStream(change(self.keys), change(self.values))

    def __iter__(self) -> Iterator[T]:
        return iter((self.keys, self.values))

    def __repr__(self) -> str:
        return repr(dict(zip(STREAMS, self, strict=True)))


Streams: TypeAlias = Mapping[str, T] | PerStream[T]
"""The type of an option with a value for keys and one for values, as in `bits: int | Streams[int]`."""


def is_per_stream(option: Any) -> bool:
    """Whether an option's value has one part for keys and one for values: a `PerStream`, or a mapping with just these two keys."""
    return isinstance(option, PerStream) or (isinstance(option, Mapping) and set(option) == set(STREAMS))


def of_streams(name: str, option: T | Streams[T], check: Callable[[str, Any], None] | None = None) -> PerStream[T]:
    """Returns an option's values for keys and for values; what is neither a mapping nor a `PerStream` holds for both.

    Args:
        name: the option's name, for messages.
        option: its value, as the method's field holds it.
        check: raises ValueError for a wrong value; called with the name for the message (`bits`, or `bits of keys`) and the value.

    Raises:
        ValueError: if a mapping has other keys than `keys` and `values`, or if `check` raises it.
    """
    if isinstance(option, Mapping):
        if not is_per_stream(option):
            raise ValueError(
                f"{name} must be one setting for both streams or {{keys: ..., values: ...}}, got {printable(option)}; name both"
            )
        option = PerStream(option["keys"], option["values"])
    if isinstance(option, PerStream):
        for role, setting in zip(STREAMS, option, strict=True):
            if check is not None:
                check(f"{name} of {role}", setting)
        return option
    if check is not None:
        check(name, option)
    return PerStream(option, option)


def as_written(option: Any) -> Any:
    """Returns an option's value as YAML writes it: a `PerStream` becomes a mapping, also within lists; anything else stays."""
    if isinstance(option, list | tuple):
        return type(option)(map(as_written, option))
    return dict(zip(STREAMS, option, strict=True)) if isinstance(option, PerStream) else option
