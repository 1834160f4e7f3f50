"""`selection.py`: of each function that is not left out some items are taken; over functions, every kind of store has its turn."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import CASES
from contract.cell import Cell
from selection import SOME, TURNS, WHOLE, few, function, in_turn, kind, quick, sample
from store_kinds import kinds

from calib.runtime.offload.plan import STORES as OFFLOAD_STORES
from calib.runtime.tiered.plan import STORES as TIERED_STORES


@dataclass
class Row:
    """A row of a table of scenarios."""

    walk: str
    options: dict[str, Any]


def product(name="test", **values):
    """Return items of a function `name` with every combination of its parameters' values, in pytest's order."""
    items = [{}]
    for key, those in values.items():
        items = [{**item, key: number} for item in items for number in range(len(those))]
    return [
        SimpleNamespace(
            nodeid=f"{name}[{number}]",
            callspec=SimpleNamespace(indices=item, params={key: values[key][at] for key, at in item.items()}),
        )
        for number, item in enumerate(items)
    ]


def test_every_store_and_codec_is_of_a_kind_that_some_case_has():
    words = {word for found in kinds().values() for word in found.split()}
    stores = {store.__name__ for store in (*TIERED_STORES.values(), *OFFLOAD_STORES.values())}
    assert stores | {"OrderedStore"} | {"Exact", "UniformQuant", "Corrected", "Sparse", "MixedQuant"} <= words
    assert kinds()["rtn-4"] != kinds()["kivi-4"] and kinds()["full"] != kinds()["offload"]


@pytest.mark.parametrize("of", [lambda case: case, lambda case: case.name, lambda case: Cell(case.name, "m", "a")])
def test_of_cases_one_of_every_tenth_kind_is_taken_and_the_others_for_another_function(of):
    cases, found = [of(case) for case in CASES], []
    for number in range(100):
        taken = few(product(f"test_{number}", case=cases, length=[1, 20, 300]))
        assert abs(len(taken) - len(set(kinds().values())) / TURNS) < 1
        assert len(set(map(kind, taken))) == len(taken)
        assert len({item.callspec.params["length"] for item in taken}) == min(3, len(taken))
        found += map(kind, taken)
    assert {*found} == {*kinds().values()}


def test_of_other_parameters_one_set_is_taken():
    assert len(few(product(bits=[1, 2, 4, 8], group=["a", "b"]))) == 1


def test_a_sample_has_every_tenth_kind_in_turn_and_every_value_and_another_case_for_another_function():
    functions = [in_turn(product(f"test_{number}", case=CASES, length=[1, 20, 300])) for number in range(1000)]
    share = len(set(kinds().values())) / TURNS
    for taken in functions:
        assert share - 1 < len(set(map(kind, taken))) and len(taken) <= share + 3
        assert {item.callspec.params["length"] for item in taken} == {1, 20, 300}
    assert {item.callspec.params["case"].name for taken in functions for item in taken} == set(kinds())


def test_a_value_that_few_cases_have_is_in_a_sample():
    """There are more values of `length` than kinds of store, and each is combined with two cases only."""
    lengths = [f"length {number}" for number in range(2 * len(set(kinds().values())))]
    items = product(case=CASES, length=lengths)
    rare = [item for item in items if 0 <= item.callspec.indices["case"] - item.callspec.indices["length"] < 2]
    assert {item.callspec.params["length"] for item in in_turn(rare)} == {*lengths}


def test_of_a_table_whose_rows_have_nothing_in_common_some_are_in_a_sample():
    table = product(words=[f"wrong {number}" for number in range(20)])
    assert len(in_turn(table)) == SOME
    assert in_turn(product("tests/hostile/test_words.py::test", words=[*"abcdefgh"]))[-1].nodeid.endswith("[7]")
    assert {path for path in WHOLE if not (Path(__file__).parents[1] / path).exists()} == set()


def test_a_sample_of_other_parameters_has_some_and_every_value():
    taken = in_turn(product(bits=[1, 2, 4, 8, 16, 32], group=["a", "b"]))
    assert {item.callspec.params["bits"] for item in taken} == {1, 2, 4, 8, 16, 32}
    assert {item.callspec.params["group"] for item in taken} == {"a", "b"}
    assert len(taken) == 6 and len(in_turn(product(group=["a", "b"], flag=[True, False, None]))) == 3
    assert len(in_turn(product(bits=[1]))) == 1


def test_of_a_dataclass_every_field_and_every_option_is_in_a_sample():
    rows = [Row(walk, {"bits": bits, "group": group}) for walk in "ab" for bits in range(5) for group in (32, None)]
    taken = in_turn(product(row=rows))
    said = {(row.walk, *row.options.items()) for row in (item.callspec.params["row"] for item in taken)}
    assert set().union(*said) == {"a", "b", ("group", 32), ("group", None), *(("bits", bits) for bits in range(5))}
    assert len(taken) == 5


@pytest.mark.parametrize(("take", "left_out"), [(quick, ("slow", "full")), (sample, ("slow",))])
def test_no_function_is_lost(request, take, left_out):
    """Among the tests that this run collected; tests with a marker in `left_out` need not be taken."""

    def offered(items):
        return {function(item) for item in items if not any(map(item.get_closest_marker, left_out))}

    items = request.session.items
    assert offered(take(items)) == offered(items)
    assert len(take(items)) <= len(items) and request.node in take(items)
