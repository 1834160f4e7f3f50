"""Parts of `make gpu`: only measured figures are reported, and a failing measurement does not affect the others."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import decode_attention, graphs, report, saliency, supervise, turns
from benchmarks.gpu.agreement import Disagrees, agree, equal, kernels
from benchmarks.gpu.bench import LATE, Bench, Measured, Measurement, NotMeasured
from benchmarks.gpu.sizes import REAL, TOY
from benchmarks.gpu.targets import TARGETS
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


def test_the_document_shows_the_newest_measurement_of_every_row():
    """The document has the comparison of all GPUs, and the file name of every run."""
    files = list(report.RESULTS.glob("gpu-*.json"))
    runs = sorted((json.loads(file.read_text()) for file in files), key=lambda run: run["when"])
    text = (ROOT / "docs/results/gpu/README.md").read_text()
    assert report.compared(runs) in text
    assert all(file.name in text for file in files)


def test_a_row_without_a_figure_does_not_hide_an_older_one():
    first, second = {"name": "GEAR", "figures": {"speedup": [1, 1, 1]}}, {"name": "GEAR", "reason": "no time"}
    runs = [{"measurements": [second]}, {"measurements": [first]}, {"measurements": [second]}]
    assert report.newest(runs) == [first] and report.newest(runs[:1]) == [second]


def test_a_file_of_a_run(tmp_path):
    """The file is complete after every record, so a run that is stopped early keeps its results so far."""
    records = [
        {"name": "decode attention", "figures": {"speedup": [3.9, 4.1, 4.2]}, "details": {}},
        {"name": "uniform 4 bit", "figures": {"speedup": [2.8, 2.9, 3.0], "share of copy": [0.6, 0.65, 0.7]}},
        {"name": "quantise and pack", "figures": {"one pass": [0.9, 1.0, 1.1], "two passes": [1.0, 1.2, 1.3]}},
        {"name": "GEAR", "reason": "no kernel: attend"},
    ]
    run = report.Run({"name": "NVIDIA Some GPU"}, tmp_path / "new" / "folder")
    assert run.file.name.startswith("gpu-nvidia-some-gpu-") and run.file.suffix == ".json"
    for count, record in enumerate(records):
        read = json.loads(run.file.read_text())
        assert len(read["measurements"]) == count and read["tests"] == {}
        run.add(record)
    run.tests = {"line": "3 passed", "failed": []}
    run.keep()
    read = json.loads(run.file.read_text())
    assert read["versions"]["torch"] == version("torch") and read["tests"]["line"] == "3 passed"
    assert 0 <= read["seconds"] < 60 and list(run.file.parent.iterdir()) == [run.file]
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


def test_where_a_run_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    assert report.folder_of(None) == report.RESULTS
    monkeypatch.setenv("OUT", str(tmp_path))
    assert report.folder_of(None) == tmp_path
    assert report.folder_of(tmp_path / "other") == tmp_path / "other"


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
    def wrong(query, keys, positions, scale, **known):
        right = saliency_mass(query, keys, positions, scale, **known)
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
    """Ratios are computed within a turn (one timing of every step), so a machine that slows down from turn to turn changes none."""
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
        turns.in_turns(bench(-LATE), {"ours": lambda: None}, {})
    with pytest.raises(NotMeasured, match="its time was over"):
        turns.in_turns_or_none(bench(-LATE), {"ours": lambda: None}, {}, {})
    assert turns.in_turns_or_none(bench(-LATE), {"ours": lambda: None}, {}, {"before": [1.0]}) is None


def test_the_least_number_of_turns_follows_a_long_preparation():
    """Compiling may take the whole time of a measurement. What is left to do is then short, and GRACE has room for it."""
    given = replace(bench(seconds=0), sizes=replace(TOY, turns=21))
    assert turns.in_turns(given, {"ours": lambda: None}, {})["turns"]["kept"] == [turns.LEAST]
    assert LATE < supervise.GRACE


@pytest.mark.parametrize("done", [True, False])
def test_what_was_timed_before_the_time_was_over_is_kept(done, monkeypatch):
    def measured(bench, method, heads, options):
        if options["rope"] == "after" or not done:
            raise NotMeasured("its time was over")
        return Measured({"speedup": [1.0, 2.0, 3.0]})

    monkeypatch.setattr(decode_attention, "measured", measured)
    record = record_of(Measurement("transform coding", decode_attention.components, 5), CPU, TOY, 5)
    assert record.get("figures") == ({"speedup, before RoPE": [1.0, 2.0, 3.0]} if done else None)
    assert (record["details"]["after"] if done else record)["reason"] == "its time was over"


def test_why_a_step_is_not_replayed_begins_with_what_went_wrong_first(monkeypatch):
    """An operation that no recording allows invalidates it, and torch then raises another error at its end."""
    calls = []

    def recorded(step, holder):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graphs, "_recorded", recorded)
    for name, found in (("current_stream", "before"), ("set_stream", None), ("synchronize", None)):
        monkeypatch.setattr(
            torch.cuda, name, lambda *given, name=name, found=found: calls.append((name, *given)) or found
        )
    _, way = graphs.replayed(replace(bench(), device=torch.device("cuda")), lambda: None, None)
    assert way.startswith("eager: RuntimeError: operation not permitted when stream is capturing, then RuntimeError: ")
    assert calls == [("current_stream",), ("set_stream", "before"), ("synchronize",)]


def test_inputs_leave_no_trace_in_the_l2():
    """The sets of inputs that are used in turn hold at least four times an L2 cache of 60 MB, even with codes of 2 bits."""
    cache = 2 * REAL.batch * REAL.kv_heads * REAL.tokens * REAL.head_dim * 2 // 8
    assert REAL.sets >= 8 and REAL.sets * cache >= 4 * 60e6 and REAL.host_sets * cache >= 4 * 60e6


# --- the command ---


@pytest.mark.full
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


BARE = """
import runpy, sys
for name in ("jsonargparse", "datasets", "wandb", "rich", "optimum", "hqq", "sklearn", "onnx", "lm_eval"):
    sys.modules[name] = None  # whoever imports it fails
"""


@pytest.mark.full
def test_what_a_machine_with_a_gpu_need_not_have():
    """The benchmarks run without the packages that calib needs for its command line, corpora, logging and exports."""
    script = BARE + (
        "import benchmarks.gpu.__main__, benchmarks.gpu.targets, benchmarks.gpu.gpu_tests, benchmarks.gpu.supervise\n"
        "sys.argv[1:] = ['0', 'no measurement']\n"
        "runpy.run_module('benchmarks.gpu.worker', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_the_tests_that_need_a_gpu_import_nothing_else():
    script = BARE + (
        "import pytest\nsys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', 'tests/gpu']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "test_attend.py" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
