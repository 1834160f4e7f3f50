"""benchmarks/quantise_cpu.py: sides that do not solve the same task are told before anything is timed."""

import importlib

import pytest

pytest.importorskip("hqq", reason="the extra `peers` (hqq) is not installed")
pytest.importorskip("optimum.quanto", reason="the extra `peers` (optimum-quanto) is not installed")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("quantise_cpu")


@pytest.mark.parametrize("count", [128, 160], ids=["a block", "a prompt"])
def test_every_side_decodes_what_it_encoded(benchmark, count):
    found = benchmark.errors(4, benchmark.tokens(count, 0))
    assert found["clone"] == [0, 0] and found["kivi"] == found["kivi again"]
    assert all(0 < error < 0.2 for side in ("kivi", "by token", "quanto", "hqq") for error in found[side])


def test_errors_are_compared_before_the_timed_runs(benchmark, monkeypatch):
    timed = []
    monkeypatch.setattr(benchmark, "turn_by_turn", lambda *asked: timed.append(asked))
    monkeypatch.setattr(benchmark, "WORST", 1.0)  # nobody errs exactly as much
    with pytest.raises(SystemExit, match=r"errs by 0\.\d+ on values, ours by 0\.\d+"):
        benchmark.measure(160, 4, 3)
    assert not timed
