"""The summary that `make gpu` gives of the tests that need a GPU, also if their time runs out."""

from pathlib import Path

import pytest

from benchmarks.gpu import gpu_tests

pytestmark = pytest.mark.arithmetic

ROOT = Path(__file__).parents[2]

SOME = """
import pytest, signal, time

def test_good(): pass

@pytest.mark.parametrize("given", ["two words", "one"])
def test_bad(given): assert False, "a reason"

@pytest.mark.skip(reason="needs a CUDA device")
def test_none(): pass
"""


@pytest.mark.full
def test_outcomes(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(SOME)
    found = gpu_tests.run(20, tmp_path / "log", str(tmp_path))
    assert (found["passed"], found["failed_tests"], found["skipped"], found["status"]) == (1, 2, 1, 1)
    assert len(found["failed"]) == 2 and "test_bad[two words]" in found["failed"][0] and "2 failed" in found["line"]
    assert "a reason" in found["failed"][0] and "test_good" in (tmp_path / "log").read_text()
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None)
    assert gpu_tests.run(20, tmp_path / "log")["line"] == "pytest is missing: no test was run"


@pytest.mark.full
@pytest.mark.parametrize(
    "hanging",
    ["time.sleep(60)", "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"],
    ids=["interrupted", "killed"],
)
def test_a_run_that_is_cut_off_tells_what_failed(tmp_path, monkeypatch, hanging):
    (tmp_path / "test_some.py").write_text(f"{SOME}\ndef test_hanging(): {hanging}\n")
    monkeypatch.setattr(gpu_tests, "CLOSING", 3)
    found = gpu_tests.run(12, tmp_path / "log", str(tmp_path))
    assert found["line"].startswith("stopped after 12 s: ") and "2 failed" in found["line"]
    assert (found["passed"], found["failed_tests"], found["skipped"]) == (1, 2, 1)
    assert len(found["failed"]) == 2 and any("test_bad[two words]" in line for line in found["failed"])
    assert found["status"] not in (0, 5)


LOST = f"""
import sys
sys.path.append({str(Path(__file__).parents[1] / "support")!r})
from gpu import lost_device
from gpu.lost_device import pytest_runtest_makereport
lost_device.is_lost = lambda: "bad" in sys.modules  # for the rest of the process
"""
LOSING = """
import sys

def test_before(): pass

def test_bad():
    sys.modules["bad"] = sys
    assert False, "an illegal memory access"

def test_after(): assert "bad" not in sys.modules
"""


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_tests_behind_one_in_which_the_device_fails_run_in_another_process(tmp_path, monkeypatch, processes):
    (tmp_path / "conftest.py").write_text(LOST)
    (tmp_path / "test_losing.py").write_text(LOSING)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "WORKERS", processes)
    if processes == 1:  # as without pytest-xdist
        monkeypatch.setattr(gpu_tests, "find_spec", lambda name: name == "pytest" or None)
    found = gpu_tests.run(300, tmp_path / "log", str(tmp_path))
    assert (found["passed"], found["failed_tests"], found["status"]) == (2, 1, 1)
    assert len(found["failed"]) == 1 and "test_bad" in found["failed"][0]
    assert "an illegal memory access" in (tmp_path / "log").read_text()
    if processes == 1:
        assert found["line"] == "the device failed in 1 test: 2 passed, 1 failed"


def test_kernels_are_tested_before_models():
    files = gpu_tests.files()
    assert sorted(files) == sorted(f"tests/gpu/{file.name}" for file in (ROOT / "tests/gpu").glob("test_*.py"))
    assert files[-2:] == [f"tests/gpu/{name}" for name in gpu_tests.WHOLE_MODELS]


def test_what_several_processes_have_said():
    said = """created: 2/2 workers
some.py::test_good
[gw0] [ 33%] PASSED some.py::test_good
some.py::test_bad[two words]
[gw1] [ 66%] FAILED some.py::test_bad[two words]
[gw0] [100%] ERROR some.py::test_worse """
    found = gpu_tests.outcome(said, -9, "stopped after 9 s")
    assert found["line"] == "stopped after 9 s: 1 passed, 1 failed, 1 error"
    assert found["failed"] == ["FAILED some.py::test_bad[two words]", "ERROR some.py::test_worse"]
    assert gpu_tests.outcome("ModuleNotFoundError: torch", 4, None)["line"].endswith(
        "status 4: ModuleNotFoundError: torch"
    )


def test_a_test_that_takes_too_long_is_ended_where_the_plugin_is_there(monkeypatch):
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: name == "pytest_timeout" or None)
    assert " --timeout 90" in " ".join(gpu_tests.command(100, "tests/gpu"))
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None)
    assert not {"--timeout", "-n"} & set(gpu_tests.command(100, "tests/gpu"))
