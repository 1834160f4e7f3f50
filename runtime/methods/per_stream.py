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
    """The setting of keys and the one of values; `keys, values = ...` takes it apart.

    It can be hashed, so a field may have it as its default; it is printed as a user writes it.
    """

    keys: T
    values: T

    def of(self, role: str) -> T:
        """The setting of "keys" or of "values"."""
        return dict(zip(STREAMS, self, strict=True))[role]

    def map(self, change: Callable[[T], U]) -> "PerStream[U]":
        """`change` of either setting."""
        return PerStream(change(self.keys), change(self.values))

    def __iter__(self) -> Iterator[T]:
        return iter((self.keys, self.values))

    def __repr__(self) -> str:
        return repr(dict(zip(STREAMS, self, strict=True)))


Streams: TypeAlias = Mapping[str, T] | PerStream[T]
"""How an option says both: `bits: int | Streams[int]`."""


def is_per_stream(option: Any) -> bool:
    """Whether an option has a setting for keys and one for values, as YAML and Python write it or as a method holds it."""
    return isinstance(option, PerStream) or (isinstance(option, Mapping) and set(option) == set(STREAMS))


def of_streams(name: str, option: T | Streams[T], check: Callable[[str, Any], None] | None = None) -> PerStream[T]:
    """The settings of keys and of values that `option` says; anything but a mapping is the setting of both.

    Args:
        name: of the option.
        option: its value, as the field holds it.
        check: refuses a single setting; it is given the name to say, `bits`, or `bits of keys`.

    Raises:
        ValueError: a mapping that has not just `keys` and `values`; and what `check` raises.
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
    """An option as YAML writes it: a `PerStream` becomes a mapping, also within lists; anything else stays."""
    if isinstance(option, list | tuple):
        return type(option)(map(as_written, option))
    return dict(zip(STREAMS, option, strict=True)) if isinstance(option, PerStream) else option
