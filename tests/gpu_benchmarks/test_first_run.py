"""The commands of docs/results/gpu, checked without a GPU: the tests and measurements that they name exist, their time limits
suffice, and without a GPU they print one line."""

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from launches import watch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import launch_options, report, supervise
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sizes import TOY
from benchmarks.gpu.targets import MEASUREMENTS, ON_REQUEST
from calib.kernels.attend import page_launch
from calib.kernels.attend import triton as attend

pytestmark = pytest.mark.arithmetic

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/results/gpu/README.md").read_text()
LINES = [line.strip() for line in TEXT.splitlines() if re.match(r"    (python -m benchmarks\.gpu|timeout) ", line)]
OWN = [shlex.split(line)[3:] for line in LINES if line.startswith("python -m benchmarks.gpu ")]
TOOLS = [shlex.split(line) for line in LINES if line.startswith("timeout")]


@pytest.mark.parametrize("words", OWN, ids=" ".join)
def test_a_command_names_what_there_is_and_ends_in_time(words):
    asked = command.parser().parse_args(words)
    assert asked.seconds <= 540
    names = {one.name: one.seconds for one in (*MEASUREMENTS, *ON_REQUEST)}
    assert set(asked.only or []) <= set(names)
    assert all((ROOT / path).exists() for path in asked.tests or [])
    assert bool(asked.only) != bool(asked.tests) and asked.no_tests == bool(asked.only)
    assert sum(names[name] for name in asked.only or []) <= asked.seconds


def test_they_are_all_there():
    assert len(OWN) == 8 and len(TOOLS) == 3
    asked = [command.parser().parse_args(words) for words in OWN]
    named = {name for one in asked for name in one.only or []}
    assert named == {one.name for one in (*MEASUREMENTS, *ON_REQUEST)}


@pytest.mark.full
@pytest.mark.parametrize("words", TOOLS, ids=lambda words: words[4])
def test_a_tool_is_given_tests_or_measurements_that_there_are(words):
    assert words[:2] == ["timeout", "-s"] and int(words[3]) <= 300
    given = words[words.index("python") :]
    if "benchmarks.gpu.worker" in given:
        seconds, *names = given[3:]
        assert float(seconds) < int(words[3]) and set(names) <= {one.name for one in MEASUREMENTS}
        return
    done = subprocess.run(
        [sys.executable, *given[1:], "--collect-only", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    found = re.search(r"^(\d+)(/\d+)? tests collected", done.stdout, re.M)
    assert done.returncode == 0 and found and 0 < int(found[1]) <= 40, done.stdout[-1000:]


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *words])
    status = command.main()
    said = capsys.readouterr()
    return status, (said.out + said.err).strip().splitlines()


@pytest.mark.skipif(command.refused() is None, reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("words", OWN, ids=" ".join)
def test_without_a_gpu_every_command_is_one_line(words, monkeypatch, capsys):
    status, lines = run(monkeypatch, capsys, *words)
    assert status == 1 and len(lines) == 1 and "needs an NVIDIA GPU" in lines[0]


def test_names_are_told_without_a_gpu(monkeypatch, capsys):
    status, lines = run(monkeypatch, capsys, "--list")
    assert status == 0 and lines == [one.name for one in (*MEASUREMENTS, *ON_REQUEST)]


def test_measurements_run_in_the_order_in_which_they_are_named(monkeypatch, tmp_path):
    ran, names = [], ["largest batch", "step profile", "GEAR", "largest batch"]
    monkeypatch.setattr(command, "refused", lambda names_only=False: None)
    monkeypatch.setattr(command, "ends_its_processes", lambda: None)
    monkeypatch.setattr(report, "device_of", lambda: {"name": "GPU", "memory_bytes": 0})
    monkeypatch.setattr(supervise, "supervised", lambda chosen, *given: ran.extend(one.name for one in chosen))
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--no-tests", "--output", str(tmp_path), "--only", *names])
    assert command.main() == 0 and ran == names[:3]


def test_a_name_or_a_path_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(command, "refused", lambda names_only=False: None)
    for words, expected in (
        (["--only", "decode atention"], "--only takes of: decode attention, "),
        (["--tests", "tests/gpu/test_none.py"], "there is no 'tests/gpu/test_none.py'"),
    ):
        status, lines = run(monkeypatch, capsys, *words)
        assert status == 2 and len(lines) == 1 and expected in lines[0]


def test_launch_options_reach_the_launch_and_are_taken_back(monkeypatch):
    from calib.kernels.attend.operation import PageSpan
    from calib.kernels.attend.signatures import stream_of

    launched, own = watch(monkeypatch, "attend", runs=False), (page_launch.PROGRAMS, page_launch.stages_of)
    query, stream = torch.zeros(1, 1, 4, 128, device="meta"), stream_of(4)
    stretch = PageSpan(*(torch.zeros(size, dtype=torch.int32, device="meta") for size in ((1, 8), (1,))))
    stages = []
    for given in (None, (12, 2), None):
        if given is None:
            attend.attend_pages(query, stream, stream, stretch, None, None, False, False)
        else:
            with launch_options.options(*given):
                assert given[0] == page_launch.PROGRAMS
                attend.attend_pages(query, stream, stream, stretch, None, None, False, False)
        stages.append(next(one for one in reversed(launched) if one.kernel == "attend").arguments["num_stages"])
    assert stages == [5, 2, 5] and (page_launch.PROGRAMS, page_launch.stages_of) == own


class OutOfResources(Exception):
    """Like Triton's, which is no RuntimeError."""


@pytest.mark.full
def test_an_option_that_cannot_be_launched_does_not_stop_the_others(monkeypatch):
    stages, run, compare = [], launch_options.each, launch_options.agree

    @contextmanager
    def options(*given):
        stages.append(given[1])
        yield
        stages.pop()

    def each(layers, steps):
        output = run(layers[:1] if 5 in stages else layers, steps[:1] if 5 in stages else steps)
        if 5 in stages:  # in the second layer: the step of this cache is never finished
            raise OutOfResources("shared memory")
        return output

    def agree(*given):
        if 5 in stages:
            raise OutOfResources("shared memory")
        return compare(*given)

    few = (("PROGRAMS", (8,)), ("STAGES", (5, 3)), ("WARPS", ()))
    for name, own in (*few, ("options", options), ("each", each), ("agree", agree)):
        monkeypatch.setattr(launch_options, name, own)
    for measure, first in ((launch_options.batch_1, "4 bit"), (launch_options.of_steps, "zipcache")):
        found = measure(Bench(torch.device("cpu"), TOY, time.monotonic() + 60))
        assert f"{first}, 8 programs, 3 stages" in found.figures
        assert not any("5 stages" in name for name in found.figures)
        assert found.details[first]["refused"]["8 programs, 5 stages"] == "OutOfResources: shared memory"


def test_launches_are_kept_from_beginning_early(monkeypatch):
    def early(device):
        return True

    monkeypatch.setattr(launch_options.exact_triton, "begins_early", early)
    with launch_options.one_by_one():
        assert launch_options.exact_triton.begins_early("cuda") is False
    assert launch_options.exact_triton.begins_early is early
