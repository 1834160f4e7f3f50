"""Selects the tests of a run: `pytest --quick` runs a few sets of parameters of each test function, `pytest --sample` more.

Both leave out tests marked `slow`. Of a function that runs over the table of methods, both take one case for every tenth kind of
store (`store_kinds.py`), starting at another kind for each function, so that every kind is in some test. Of any other function
`quick` takes one set of parameters, and none marked `full`. `sample` takes of functions marked `full` what `quick` takes of others;
of others SOME sets, and more until every value that several sets share is included; and all sets of files in WHOLE. The choice
follows from the tables of cases alone, so a new test or method needs no entry here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any
from zlib import crc32

import pytest
from cases import BY_NAME, Case
from store_kinds import kinds

SOME = 2
TURNS = 10  # a function takes one of this many kinds of stores
# Folders whose sets of parameters are all taken: each is another document or another damage.
WHOLE = ("tests/docs/", "tests/hostile/")


def quick(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of `items` that a quick run takes, in their order."""
    return _taken(items, ("slow", "full"), few)


def sample(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of `items` that a sampled run takes, in their order."""
    return _taken(items, ("slow",), _sampled)


def _taken(
    items: Sequence[pytest.Item], left_out: tuple[str, ...], choose: Callable[[list[Any]], list[Any]]
) -> list[pytest.Item]:
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, left_out)):
            functions.setdefault(function(item), []).append(item)
    taken = {item for those in functions.values() for item in choose(those)}
    return [item for item in items if item in taken]


def function(item: Any) -> str:
    """The file and name of the item's test function."""
    return str(item.nodeid).partition("[")[0]


def _sampled(items: list[Any]) -> list[Any]:
    """The items of one function for a sample: `few` if all are marked `full` (about a second or more each), else `in_turn`."""
    brief = all(item.get_closest_marker("full") for item in items) and not items[0].nodeid.startswith(WHOLE)
    return few(items) if brief else in_turn(items)


def few(items: list[Any]) -> list[Any]:
    """Of one function's items, one for every tenth kind of store, starting at another kind for each function; one of a function
    without cases. Among several, the one whose parameter values were taken least so far."""
    counts, found = Counter[str](), []
    for number, (name, group) in enumerate(groups := _by_kind(items).items()):
        if name is None or _is_its_turn(items, number, len(groups)):
            found += _various(group, 1, counts)
    return found


def in_turn(items: list[Any]) -> list[Any]:
    """Of one function's items, one for every tenth kind of store, starting at another kind for each function; SOME without cases.

    Items are added until every parameter value, other than the case, that several items share is included.
    """
    found, whole = [], items[0].nodeid.startswith(WHOLE)
    for number, (name, group) in enumerate(groups := _by_kind(items).items()):
        if name is None:
            found += group if whole else _various(group, SOME, Counter[str]())
        elif _is_its_turn(items, number, len(groups)):
            found.append(group[crc32(f"{function(items[0])} {name}".encode()) % len(group)])
    missing = _shared(items) - _met(found)
    while missing:
        best = max(items, key=lambda item: len(missing & _met([item])))
        found.append(best)
        missing -= _met([best])
    return found


def _is_its_turn(items: list[Any], number: int, groups: int) -> bool:
    """Whether the function of these items takes the kind of store with this `number`."""
    return (number - crc32(function(items[0]).encode())) % min(TURNS, groups) == 0


def _various(items: list[Any], number: int, counts: Counter[str]) -> list[Any]:
    """Take `number` of `items`, each time the one whose parameter values were taken least; `counts` of taken values are updated."""
    left, found = list(items), list[Any]()
    for _ in range(min(len(left), number)):
        best = min(left, key=lambda item: sum(counts[value] for value in _values(item)))
        left.remove(best)
        found.append(best)
        counts.update(_values(best))
    return found


def _shared(items: list[Any]) -> set[str]:
    counts = Counter(value for item in items for value in _values(item))
    return {value for value, number in counts.items() if number > 1}


def _met(items: list[Any]) -> set[str]:
    return set().union(*map(_values, items))


def _by_kind(items: list[Any]) -> dict[str | None, list[Any]]:
    groups: dict[str | None, list[Any]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return groups


def kind(item: Any) -> str | None:
    """The kind of store of the item's case: a parameter that is a case, its name, or has it as `method`. None without a case."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    names = [name for value in params.values() if (name := _case_name(value)) is not None]
    return kinds()[names[0]] if names else None


def _case_name(value: Any) -> str | None:
    if isinstance(value, Case):
        return value.name if value is BY_NAME.get(value.name) else None
    name = value if isinstance(value, str) else getattr(value, "method", None)
    return name if isinstance(name, str) and name in BY_NAME else None


def _values(item: Any) -> set[str]:
    """The item's parameter values other than the case, as texts; of a dataclass, every field, and of a mapping every entry."""
    found = set()
    for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
        if is_dataclass(value) and not isinstance(value, Case):
            for field, content in vars(value).items():
                entries = content.items() if isinstance(content, dict) else [("", content)]
                found |= {f"{name}.{field} {key} {entry}" for key, entry in entries}
        elif _case_name(value) is None:
            found.add(f"{name} {id(value)}")  # tables joined into one parameter share their objects
    return found
