"""Parameters from products of two tables: every test run takes a part of a product, `make test-all` all of it."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from cases import Case


def in_turn(cases: Iterable[Case], values: Sequence[Any], taken: int = 1) -> list[Any]:
    """Parameters (case, value) of the whole product; all but `taken` values of each case are marked slow.

    So every case is in every run, and every value with cases of many methods: the cases of a method take the values in turn, and
    the next method begins with the next value.
    """
    parameters, turns = [], dict[str, int]()
    for case in cases:
        turn = turns.setdefault(case.method, len(turns))
        turns[case.method] += taken
        quick = {(turn + step) % len(values) for step in range(taken)}
        for number, value in enumerate(values):
            name = value if isinstance(value, str) else str(value).removeprefix("torch.")
            marks = () if number in quick else pytest.mark.slow
            parameters.append(pytest.param(case, value, marks=marks, id=f"{case}-{name}"))
    return parameters


def a_part(scenarios: Sequence[Any], share: float = 0.3) -> list[Any]:
    """Parameters of all scenarios, which are dataclasses; all but about a `share` of them are marked slow.

    Scenarios are chosen greedily by the number of new pairs of (field, value) that they add, until the share is reached and every
    (field, value) of any scenario is in a chosen one.
    """
    says = [_said(scenario) for scenario in scenarios]
    missing, left = set().union(*map(_pairs, says)), list(range(len(scenarios)))
    singles, chosen = set().union(*says), set[int]()
    while left and (len(chosen) < share * len(scenarios) or singles):
        # A new single (field, value) weighs more than any number of new pairs.
        best = max(left, key=lambda number: (len(says[number] & singles), len(_pairs(says[number]) & missing)))
        left.remove(best)
        chosen.add(best)
        missing -= _pairs(says[best])
        singles -= says[best]
    return [
        pytest.param(scenario, marks=() if number in chosen else pytest.mark.slow, id=str(scenario))
        for number, scenario in enumerate(scenarios)
    ]


def _said(scenario: Any) -> set[str]:
    """Every field of a scenario with its value, as text; a field that is a mapping gives its entries."""
    found = set()
    for name, value in vars(scenario).items():
        entries = value.items() if isinstance(value, dict) else [(name, value)]
        found |= {f"{entry} {content}" for entry, content in entries}
    return found


def _pairs(said: set[str]) -> set[tuple[str, ...]]:
    return set(combinations(sorted(said), 2))
