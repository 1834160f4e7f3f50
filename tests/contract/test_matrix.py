"""The contract: methods x modes x architectures, each cell compared with its oracle (docs/results/contract.md)."""

from dataclasses import asdict

import pytest
from contract.architectures import BY_NAME
from contract.cell import Cell, run
from contract.matrix import CELLS, METHODS, sample
from contract.modes import MODES
from release_limits import NO_SLIDING_DRAFTS, drafts_may_slide

SAMPLE = set(sample())


def pytest_generate_tests(metafunc):
    """Parametrise with all cells; those outside the sample are marked slow, and a quick run does not collect them."""
    if "cell" in metafunc.fixturenames:
        cells = [cell for cell in CELLS if cell in SAMPLE or not metafunc.config.getoption("quick")]
        marked = [pytest.param(cell, marks=() if cell in SAMPLE else pytest.mark.slow, id=str(cell)) for cell in cells]
        metafunc.parametrize("cell", marked)


def test_the_cell_keeps_the_contract(cell, record_property):
    sliding = BY_NAME[cell.architecture].options.get("sliding_window")
    if cell.mode.startswith("assisted") and sliding and not drafts_may_slide():
        pytest.skip(NO_SLIDING_DRAFTS)
    record_property("cell", {**asdict(cell), "dtype": str(cell.dtype).removeprefix("torch.")})
    record_property("result", asdict(run(cell)))


def test_every_method_mode_architecture_and_dtype_is_in_the_sample():
    for entry in ("method", "mode", "architecture", "dtype"):
        assert {getattr(cell, entry) for cell in SAMPLE} == {getattr(cell, entry) for cell in CELLS}
    assert {cell.mode for cell in CELLS} == set(MODES) and len(METHODS) > 1


@pytest.mark.parametrize("mode", ["prompt lookup", "assisted", "assisted sampling"])
def test_some_drafts_are_accepted_and_some_are_not(mode):
    drafts = [run(Cell("full", mode, name)).drafts for name in ("llama", "mistral")]
    assert all(0 < accepted < tried for tried, accepted in drafts), drafts
