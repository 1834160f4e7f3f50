"""Reads and checks our fields of an engine's JSON configuration; errors are one line."""

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
    """Builds the options from the JSON; fields that are null get their defaults.

    Args:
        options: the dataclass of the options.
        given: the JSON's fields.
        what: beginning of error messages, such as "serde calib".
        texts: names of the required fields, which are non-empty strings.
        wholes: names of the fields that are whole numbers of at least 1.
        alone: whether all fields are ours; otherwise unknown fields are the engine's and are ignored.

    Fields of the dataclass that are `bool` must be true or false. Raises ValueError if a field is missing, unknown or out of range.
    Bit budgets are checked by `Codec`.
    """
    known = [field.name for field in fields(options)]  # type: ignore[arg-type]
    unknown = sorted(set(given) - set(known))
    if alone and unknown:
        raise ValueError(f"{what} has no field {printable(unknown[0])}, expected one of {', '.join(known)}; remove it")
    for name in texts:
        value = given.get(name)
        if value is None:
            raise ValueError(f'{what} has no {name}, expected a string; add "{name}": "..."')
        if not isinstance(value, str) or not value:
            raise ValueError(
                f'{name} of {what} is {printable(value)}, expected a string that is not empty; write "{name}": "..."'
            )
    for name in wholes:
        if given.get(name) is not None:
            check_whole(name, given[name], 1, "a whole number, at least 1")
    for name in (field.name for field in fields(options) if field.type is bool):  # type: ignore[arg-type]
        if not isinstance(given.get(name), bool | None):
            raise ValueError(
                f'{name} of {what} is {printable(given[name])}, expected true or false; write "{name}": false, or true, '
                "without quotes"
            )
    return options(**{name: given[name] for name in known if given.get(name) is not None})
