"""Fields of an engine's JSON that are ours: read, checked, and refused in one line."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole

Options = TypeVar("Options")


def read(
    options: type[Options],
    given: Mapping[str, Any],
    what: str,
    texts: tuple[str, ...],
    wholes: tuple[str, ...] = (),
    alone: bool = True,
) -> Options:
    """The options that the JSON says; fields that are null are at their defaults.

    Args:
        options: a dataclass of them.
        given: the JSON.
        what: whose fields they are, such as "serde calib": how a message begins.
        texts: the fields that must be there, strings.
        wholes: the fields that are whole numbers, at least 1.
        alone: whether all fields are ours; otherwise others are the engine's, and left alone.

    Raises ValueError for a field that is missing, unknown or out of its range. Budgets are checked by `Codec`.
    """
    known = [field.name for field in fields(options)]  # type: ignore[arg-type]
    unknown = sorted(set(given) - set(known))
    if alone and unknown:
        raise ValueError(f"{what} has no field {printable(unknown[0])}, expected one of {', '.join(known)}; remove it")
    for name in texts:
        if not isinstance(given.get(name), str) or not given[name]:
            raise ValueError(f'{what} has no {name}, expected a string; add "{name}": "..."')
    for name in wholes:
        if given.get(name) is not None:
            check_whole(name, given[name], 1, "a whole number, at least 1")
    return options(**{name: given[name] for name in known if given.get(name) is not None})
