"""Every measurement of `make gpu` at toy size on the CPU, with plain torch instead of the kernels, so that errors are found before
time on a GPU is spent."""

import json

import pytest
import torch
from transformers import DynamicCache

from benchmarks.gpu import generation
from benchmarks.gpu.bench import Measurement
from benchmarks.gpu.sizes import TOY
from benchmarks.gpu.targets import MEASUREMENTS, ON_REQUEST, TARGETS
from benchmarks.gpu.worker import record_of

pytestmark = pytest.mark.arithmetic

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_quanto(monkeypatch):
    """Replace quanto's cache by `DynamicCache`: quanto compiles its extension at the first use."""
    monkeypatch.setattr(generation, "QuantizedCache", lambda backend, config, **sizes: DynamicCache(config=config))
    monkeypatch.setattr(generation, "find_spec", lambda name: True)


@pytest.mark.parametrize("measurement", [*MEASUREMENTS, *ON_REQUEST], ids=lambda one: one.name)
def test_a_measurement_gives_the_figures_of_its_targets(measurement):
    record = record_of(measurement, CPU, TOY, 60)
    assert "reason" not in record
    wanted = {target.figure for target in TARGETS if target.measurement == measurement.name}
    assert wanted <= set(record["figures"]), "a row of the table would stay empty"
    for low, median, high in record["figures"].values():
        assert low <= median <= high
    assert record["details"] and json.loads(json.dumps(record))["name"] == measurement.name


def test_every_target_has_its_measurement():
    assert {target.measurement for target in TARGETS} <= {one.name for one in MEASUREMENTS}
    assert len({one.name for one in (*MEASUREMENTS, *ON_REQUEST)}) == len(MEASUREMENTS) + len(ON_REQUEST)
    assert all((t.stretch >= t.accept) == t.more for t in TARGETS), "a stretch is harder than what is accepted"


def test_quanto_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(generation, "find_spec", lambda name: None)
    record = record_of(Measurement("tokens/s, quanto", generation.against_quanto, 5), CPU, TOY, 5)
    assert record["reason"] == "needs optimum-quanto"
