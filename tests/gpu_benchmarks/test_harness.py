"""What `make gpu` is made of: nothing is claimed that was not measured, and one failure takes nothing else with it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gpu_tests, report, saliency, turns
from benchmarks.gpu.agreement import Disagrees, agree, equal, kernels
from benchmarks.gpu.bench import Bench, Measured, Measurement, NotMeasured
from benchmarks.gpu.sizes import REAL, TOY
from benchmarks.gpu.supervise import supervised
from benchmarks.gpu.targets import MEASUREMENTS, TARGETS
from benchmarks.gpu.worker import record_of

pytestmark = pytest.mark.arithmetic

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def bench(seconds: float = 60) -> Bench:
    return Bench(CPU, TOY, time.monotonic() + seconds)


# --- the table and the file ---


def test_without_a_run_nothing_is_claimed():
    rows = report.rows([])
    assert [row["name"] for row in rows] == [target.name for target in TARGETS]
    assert all(row["measured"] is None and row["reason"] == "not yet measured" for row in rows)
    assert report.markdown([]).count("not yet measured") == len(TARGETS) == report.plain([]).count("not yet measured")


def test_the_document_shows_the_table_of_the_newest_run():
    """Or an empty one while there is none."""
    runs = sorted(report.RESULTS.glob("gpu-*.json"), key=lambda file: json.loads(file.read_text())["when"])
    records = json.loads(runs[-1].read_text())["measurements"] if runs else []
    text = (ROOT / "docs/results/gpu/README.md").read_text()
    assert report.markdown(records) in text
    assert not runs or runs[-1].name in text


def test_a_file_of_a_run(tmp_path):
    records = [
        {"name": "decode attention", "figures": {"speedup": [3.9, 4.1, 4.2]}, "details": {}},
        {"name": "uniform 4 bit", "figures": {"speedup": [2.8, 2.9, 3.0], "share of copy": [0.6, 0.65, 0.7]}},
        {"name": "quantise and pack", "figures": {"one pass": [0.9, 1.0, 1.1], "two passes": [1.0, 1.2, 1.3]}},
        {"name": "GEAR", "reason": "no kernel: attend"},
    ]
    run = report.run_of({"name": "NVIDIA Some GPU"}, {"line": "3 passed", "failed": []}, records, 12.34)
    file = report.keep(run, tmp_path)
    assert file.name.startswith("gpu-nvidia-some-gpu-") and file.suffix == ".json"
    read = json.loads(file.read_text())
    assert read["versions"]["torch"] == torch.__version__ and read["seconds"] == 12.3
    reached = {row["name"]: row.get("reached") for row in read["targets"]}
    assert reached["decode attention, 60/40 of 4/2 bits : SDPA"] == "stretch"
    assert reached["uniform 4 bit, g = 128 : SDPA"] == "accept"
    assert reached["share of the copy rate, 4 bit"] == "missed"
    assert reached["quantise and pack, one pass : clone()"] == "missed", "less is better there"
    assert reached["quantise and pack, two passes : clone()"] == "accept"
    reasons = {row["name"]: row.get("reason") for row in read["targets"]}
    assert (
        reasons["GEAR : SDPA"] == "no kernel: attend"
        and reasons["probe saliency : flash forward, 32k"] == report.NOT_YET
    )
    shown = report.plain(records)
    assert "4.10x (3.90x ... 4.20x)" in shown and "65 %" in shown and "no kernel: attend" in shown


# --- one measurement ---


def failing(error: Exception) -> Measurement:
    def run(given: Bench) -> Measured:
        raise error

    return Measurement("failing", run, 5)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotMeasured("needs optimum-quanto"), "needs optimum-quanto"),
        (RuntimeError("CUDA error: out of memory\nand more"), "RuntimeError: CUDA error: out of memory"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_failure_is_one_line(error, reason):
    record = record_of(failing(error), CPU, TOY, 60)
    assert record["reason"] == reason and "figures" not in record


def test_no_speed_of_a_wrong_result(monkeypatch):
    def wrong(query, keys, places, scale):
        right = saliency_mass(query, keys, places, scale)
        return right if os.environ.get("CALIB_KERNELS") == "reference" else right * 1.02

    saliency_mass = saliency.attention_mass
    monkeypatch.setattr(saliency, "attention_mass", wrong)
    record = record_of(Measurement("probe saliency", saliency.probes, 60), CPU, TOY, 60)
    assert "figures" not in record and "no speed is given" in record["reason"]


def test_agreement():
    x = torch.randn(5, 7)
    assert agree("x", x * 1.001, x, 2e-3) == pytest.approx(1e-3, rel=1e-2)
    for other in (x * 1.01, x * torch.nan, x.masked_fill(x > 0, torch.nan)):
        with pytest.raises(Disagrees):
            agree("x", other, x, 2e-3)
    equal("words", x, x.clone())
    for other in (x.double(), x[:4], x + 1):
        with pytest.raises(Disagrees):
            equal("words", other, x)


def test_the_choice_of_kernels_is_left_as_it_was(monkeypatch):
    for before in (None, "triton"):
        monkeypatch.delenv("CALIB_KERNELS", raising=False)
        if before:
            monkeypatch.setenv("CALIB_KERNELS", before)
        with kernels("reference"):
            assert os.environ["CALIB_KERNELS"] == "reference"
        assert os.environ.get("CALIB_KERNELS") == before


def test_a_missing_kernel_is_named_on_a_gpu_alone():
    bench().needs_kernel("no_such_operation")
    with pytest.raises(NotMeasured, match="no kernel: no_such_operation"):
        replace(bench(), device=torch.device("cuda")).needs_kernel("no_such_operation")


# --- turns ---


def test_ratios_are_paired_by_turn(monkeypatch):
    """A machine that slows down for all steps of a turn changes no ratio."""
    taken = {"ours": 1.0, "theirs": 3.0}
    order: list[str] = []
    monkeypatch.setattr(turns, "milliseconds", lambda bench, step: step())

    def step(name):
        def timed():
            order.append(name)
            return taken[name] * (1 + (len(order) - 1) // 2)

        return timed

    found = turns.in_turns(bench(), {name: step(name) for name in taken}, {"speedup": ("theirs", "ours")})
    assert found["ratios"]["speedup"] == [3.0, 3.0, 3.0]
    assert found["milliseconds"]["ours"][0] < found["milliseconds"]["ours"][2]
    assert len(order) == 2 * (TOY.turns + turns.WARM) and found["turns"]["kept"] == [TOY.turns]
    pairs = [tuple(order[at : at + 2]) for at in range(0, len(order), 2)]
    assert all(set(pair) == set(taken) for pair in pairs) and len(set(pairs)) == 2, "A/B and B/A"


def test_too_few_turns_are_no_figure():
    with pytest.raises(NotMeasured, match="its time was over after 0 turns"):
        turns.in_turns(bench(seconds=0), {"ours": lambda: None}, {})


def test_inputs_leave_no_trace_in_the_l2():
    """Eight caches of packed codes, at 2 bits, beside the 60 MB of the GPU of record."""
    cache = 2 * REAL.batch * REAL.kv_heads * REAL.tokens * REAL.head_dim * 2 // 8
    assert REAL.sets >= 8 and REAL.sets * cache >= 4 * 60e6 and REAL.host_sets * cache >= 4 * 60e6


# --- all of them ---


def process(*lines: str, end: str = ""):
    """A command that says `lines` of what it is asked for, then does `end`."""
    said = "; ".join(f"print({line!r}, flush=True)" for line in lines)
    return [sys.executable, "-c", f"import time, os; {said}; {end or 'pass'}"]


def line(name: str, **record: object) -> str:
    return json.dumps({"name": name, **record})


def test_a_process_that_dies_takes_one_measurement_with_it():
    asked: list[list[str]] = []

    def command(seconds, names):
        asked.append(list(names))
        if len(asked) == 1:
            good = line(names[0], figures={"speedup": [1, 2, 3]})
            return process("a library's noise", "[1]", good, json.dumps({"begin": names[1]}), end="os._exit(7)")
        return process(*(line(name, reason="needs something") for name in names))

    said: list[str] = []
    chosen = MEASUREMENTS[:4]
    records = supervised(chosen, time.monotonic() + 60, said.append, command)
    names = [one.name for one in chosen]
    assert [record["name"] for record in records] == names and asked == [names, names[2:]]
    assert records[0]["figures"] and records[1]["reason"] == "its process ended with status 7"
    assert records[3]["reason"] == "needs something" and len(said) == 4


def test_a_process_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.supervise.GRACE", 0.5)
    chosen = [Measurement("slow", failing(ValueError()).run, 0), *MEASUREMENTS[:1]]

    def command(seconds, names):
        if names[0] == "slow":
            return process(json.dumps({"begin": "slow"}), end="time.sleep(60)")
        return process(line(names[0], reason="quick"))

    start = time.monotonic()
    records = supervised(chosen, start + 60, lambda said: None, command)
    assert [record["reason"] for record in records] == ["stopped: it took longer than it may", "quick"]
    assert time.monotonic() - start < 20


def test_what_finds_no_time_is_said():
    records = supervised(MEASUREMENTS, time.monotonic(), lambda said: None)
    assert [record["name"] for record in records] == [one.name for one in MEASUREMENTS]
    assert {record["reason"] for record in records} == {"not begun: the time was over"}


def test_all_measurements_fit_into_nine_minutes():
    from benchmarks.gpu.__main__ import SECONDS, TESTS

    assert SECONDS <= 540 and sum(one.seconds for one in MEASUREMENTS) <= SECONDS - TESTS + 30


# --- the command ---


def test_without_a_gpu_there_is_one_line():
    before = sorted(report.RESULTS.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 1 and len(said.splitlines()) == 1
    assert "needs an NVIDIA GPU" in said and "nothing was measured" in said
    assert sorted(report.RESULTS.iterdir()) == before


def test_what_a_python_lacks_is_named(monkeypatch):
    from benchmarks.gpu import __main__ as command

    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "transformers" else True)
    assert "make gpu needs transformers, which this Python" in str(command.refused())


def test_outcomes_of_the_tests_that_need_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert False\n\n"
        "@pytest.mark.skip(reason='needs a CUDA device')\ndef test_none(): pass\n"
    )
    found = gpu_tests.run(20, str(tmp_path))
    assert (found["passed"], found["failed_tests"], found["skipped"], found["status"]) == (1, 1, 1, 1)
    assert len(found["failed"]) == 1 and "test_bad" in found["failed"][0] and "1 failed" in found["line"]
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None)
    assert gpu_tests.run(20)["line"] == "pytest is missing: no test was run"
