"""Hardware counters of a decode step: reading Nsight Compute's output, and running the counted steps on a CPU."""

import pytest
import torch

from benchmarks.gpu import counters
from benchmarks.gpu.sizes import TOY

PAGE = """
  attend (16, 64, 1)x(32, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    DRAM Throughput                   %        58.90
    Duration                         us        59.78
    Executed Instructions           inst   20,678,400
  put (1, 8, 2)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Duration                         us         1.20
"""


def test_the_figures_of_a_page():
    first, second = counters.kernels(PAGE)
    assert first["kernel"] == "attend" and first["grid"] == [16, 64, 1] and first["threads"] == 32
    assert (first["microseconds"], first["share of DRAM"], first["instructions"]) == (59.78, 0.589, 20678400)
    assert second == {"kernel": "put", "grid": [1, 8, 2], "threads": 128, "microseconds": 1.2}


@pytest.mark.parametrize("name", counters.STEPS)
def test_a_step(name, monkeypatch):
    method, options = counters.STEPS[name]
    small = {own: min(value, 32) if own in ("group", "residual", "block") else value for own, value in options.items()}
    monkeypatch.setitem(counters.STEPS, name, (method, small))
    counters.step(name, torch.device("cpu"), TOY)


def test_a_strange_name():
    assert "kivi, 4 bits" in counters.main(["kiwi"])


def test_a_page_that_is_not_there(tmp_path):
    assert "there is no" in counters.main(["--read", str(tmp_path / "page.txt")])
