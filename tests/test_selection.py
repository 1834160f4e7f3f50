"""A quick run looks at every test function and every kind of store; the parameters it leaves out are others of the same kind."""

from types import SimpleNamespace

import pytest
from cases import CASES
from contract.cell import Cell
from selection import FEW, few, function, kind, of_each_kind, quick, sample
from store_kinds import kinds

from calib.runtime.offload.plan import STORES as OFFLOAD_STORES
from calib.runtime.tiered.plan import STORES as TIERED_STORES


def product(name="test", **values):
    """Items of a function `name` with every combination of its parameters' values, as pytest orders them."""
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
def test_of_cases_one_of_each_kind_is_taken(of):
    taken = few(product(case=[of(case) for case in CASES], length=[1, 20, 300]))
    assert sorted(map(kind, taken)) == sorted(set(kinds().values()))
    assert {item.callspec.params["length"] for item in taken} == {1, 20, 300}


def test_of_other_parameters_a_few_are_taken_and_every_value_before_one_a_second_time():
    taken = few(product(bits=[1, 2, 4, 8], group=["a", "b"]))
    assert len(taken) == FEW
    assert len({item.callspec.params["bits"] for item in taken}) == FEW
    assert {item.callspec.params["group"] for item in taken} == {"a", "b"}
    assert len(few(product(bits=[1]))) == 1


def test_a_sample_has_every_kind_and_every_value_and_another_case_for_another_function():
    functions = [of_each_kind(product(f"test_{number}", case=CASES, length=[1, 20, 300])) for number in range(60)]
    for taken in functions:
        assert set(map(kind, taken)) == set(kinds().values()) and len(taken) <= len(set(kinds().values())) + 2
        assert {item.callspec.params["length"] for item in taken} == {1, 20, 300}
    assert {item.callspec.params["case"].name for taken in functions for item in taken} == set(kinds())


def test_a_value_that_few_cases_have_is_in_a_sample():
    """More values than kinds, each beside one case."""
    lengths = [f"length {number}" for number in range(2 * len(set(kinds().values())))]
    items = product(case=CASES, length=lengths)
    rare = [item for item in items if item.callspec.indices["case"] == item.callspec.indices["length"]]
    assert {item.callspec.params["length"] for item in of_each_kind(rare)} == {*lengths}


def test_a_sample_has_every_other_parameter():
    everything = product(bits=[1, 2, 4, 8], group=["a", "b"])
    assert of_each_kind(everything) == everything


@pytest.mark.parametrize(("take", "left_out"), [(quick, ("slow", "full")), (sample, ("slow",))])
def test_no_function_and_no_kind_is_lost(request, take, left_out):
    """Of all that this run has collected; what is marked by hand is not asked for."""

    def offered(items):
        marked = (item for item in items if not any(map(item.get_closest_marker, left_out)))
        return {(function(item), kind(item)) for item in marked}

    items = request.session.items
    assert offered(take(items)) == offered(items)
    assert len(take(items)) <= len(items) and request.node in take(items)
