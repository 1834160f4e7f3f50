"""Predictions for encoding alone: they follow from the kernels and launches of the run of record, and from formulas by hand."""

import json

import pytest
from last_bits import without_last_bits

from benchmarks.gpu.devices import COPY, DEVICES, Device
from benchmarks.gpu.encoding import WAYS
from benchmarks.gpu.encoding_cost import PROBES, ROWS, clone_seconds, encoded_values, predicted, rows
from benchmarks.gpu.prefill_launches import encoding_of
from benchmarks.gpu.roofline import RESULT
from benchmarks.gpu.targets import TARGETS

pytestmark = pytest.mark.arithmetic

WHOLE = json.loads(RESULT.read_text(encoding="utf-8"))
RUN = WHOLE["encoding"]
SMALL = Device("small", 90, 10, 1e9, 1e12, "made up")


def test_the_run_follows_from_its_kernels_and_launches():
    steps = [predicted(way, RUN["launched"][way], RUN["kernels"], own) for way in ROWS for own in DEVICES.values()]
    assert without_last_bits(steps) == without_last_bits(RUN["steps"])


@pytest.mark.parametrize("way", ROWS)
def test_every_value_is_encoded_once(way):
    groups = [group for group in RUN["launched"][way]["ours"] if "bits" in group["kernel"]]
    assert sum(group["elements"] for group in groups) == encoded_values() == 2 * 8 * 8 * 32768 * 128


@pytest.mark.parametrize("step", RUN["steps"], ids=lambda step: f"{step['way']} on {step['device']}")
def test_targets_are_within_reach(step):
    (target,) = (own for own in TARGETS if own.name == ROWS[step["way"]])
    assert step["ratio"] <= target.accept


def test_a_ratio_by_hand():
    """One kernel of 3 ms and torch's 0.9 GB, on a device that copies 0.9 TB/s."""
    kernel = {"parts": {"once": {"busy": {"issue": 90}, "alone": 1, "instructions": 90}}, "warps": 1, "programs": 8}
    group = {"kernel": "encode", "turns": {"once": 4000}, "grids": [4000], "bytes": 2_700_000_000}
    launched = {"ours": [group], "torch": {"cat": {"launches": 1, "bytes": 900_000_000, "products": 0}}}
    found = predicted("one pass", launched, {"encode for sm_90": kernel}, SMALL)
    assert clone_seconds(SMALL) == pytest.approx(4 * encoded_values() / (COPY * 1e12))
    assert found["seconds"] == pytest.approx(4e-3) and found["parts"][0]["bound"] == "bytes"
    assert found["ratio"] == pytest.approx(4e-3 / clone_seconds(SMALL))


def test_every_target_of_encoding_has_its_rows():
    found = [(row[0], row[1]) for row in rows(WHOLE, [])]
    assert sorted(found) == sorted((name, device) for name in (*ROWS.values(), PROBES) for device in DEVICES)
    assert set(ROWS) == set(WAYS)


def test_launches_are_counted_without_running_a_kernel(monkeypatch):
    """At a toy size: a pass launches one kernel for keys and one for values; ranges of channels take two launches each."""
    from benchmarks.gpu import prefill_launches
    from benchmarks.gpu.sizes import TOY

    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(prefill_launches, "REAL", TOY)
    once, twice = ([launch.kernel for launch in encoding_of(way).ours] for way in ROWS)
    assert once == ["by_planes", "token_groups"]
    assert twice == ["channel_extremes", "channel_numbers"] * 2 + once
