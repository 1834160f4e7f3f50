"""The supervisor of `make gpu`: a measurement whose process dies or hangs does not affect the others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.bench import Bench, Measured, Measurement
from benchmarks.gpu.supervise import LEAST, NOT_STARTED, STOPPED, supervised
from benchmarks.gpu.targets import MEASUREMENTS

pytestmark = pytest.mark.arithmetic

ROOT = Path(__file__).parents[2]


def failing(given: Bench) -> Measured:
    raise ValueError


def process(*lines: str, end: str = ""):
    """A command that prints `lines` and then executes `end`."""
    said = "; ".join(f"print({line!r}, flush=True)" for line in lines)
    return [sys.executable, "-c", f"import time, os; {said}; {end or 'pass'}"]


def line(name: str, **record: object) -> str:
    return json.dumps({"name": name, **record})


def all_of(chosen, seconds: float, command=None) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    supervised(chosen, time.monotonic() + seconds, found.append, *([command] if command else []))
    return found


def test_a_process_that_dies_takes_one_measurement_with_it():
    asked: list[list[str]] = []

    def command(seconds, names):
        asked.append(list(names))
        if len(asked) == 1:
            good = line(names[0], figures={"speedup": [1, 2, 3]})
            return process("a library's noise", "[1]", good, json.dumps({"begin": names[1]}), end="os._exit(7)")
        return process(*(line(name, reason="needs something") for name in names))

    chosen = MEASUREMENTS[:4]
    records = all_of(chosen, 60, command)
    names = [one.name for one in chosen]
    assert [record["name"] for record in records] == names and asked == [names, names[2:]]
    assert records[0]["figures"] and records[1]["reason"] == "its process ended with status 7"
    assert records[3]["reason"] == "needs something"


def test_a_process_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.supervise.GRACE", 0.5)
    chosen = [Measurement("slow", failing, 0), *MEASUREMENTS[:1]]

    def command(seconds, names):
        if names[0] == "slow":
            return process(json.dumps({"begin": "slow"}), end="time.sleep(60)")
        return process(line(names[0], reason="quick"))

    start = time.monotonic()
    records = all_of(chosen, 60, command)
    assert [record["reason"] for record in records] == [STOPPED, "quick"]
    assert time.monotonic() - start < 20


def test_a_process_that_dies_between_two_takes_neither():
    """As after an illegal memory access: the process reports its measurement, and ends before it begins the next."""
    asked: list[list[str]] = []

    def command(seconds, names):
        asked.append(list(names))
        said = json.dumps({"begin": names[0]}), line(names[0], reason="RuntimeError: an illegal memory access")
        return process(*said, end="os._exit(1)")

    chosen = MEASUREMENTS[:3]
    records = all_of(chosen, 60, command)
    names = [one.name for one in chosen]
    assert [record["name"] for record in records] == names and asked == [names, names[1:], names[2:]]
    assert {record["reason"] for record in records} == {"RuntimeError: an illegal memory access"}


def test_a_process_that_hangs_between_two_takes_neither(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.supervise.GRACE", 0.5)

    def command(seconds, names):
        return process(line(names[0], reason="told"), end="time.sleep(60)" if len(names) > 1 else "")

    assert [record["reason"] for record in all_of(MEASUREMENTS[:2], 60, command)] == ["told", "told"]


def test_a_process_that_begins_nothing_takes_one(monkeypatch):
    """A process that ends before it begins a measurement costs one measurement each time, so restarts come to an end."""
    records = all_of(MEASUREMENTS[:2], 60, lambda seconds, names: process("noise", end="os._exit(3)"))
    assert [record["reason"] for record in records] == ["its process ended with status 3"] * 2


def test_a_record_is_kept_while_the_others_are_measured():
    """The callback gets each record at once, not at the end, so results survive if the supervisor is stopped."""
    seen: list[float] = []
    supervised(
        MEASUREMENTS[:2],
        time.monotonic() + 60,
        lambda record: seen.append(time.monotonic()),
        lambda seconds, names: [
            sys.executable,
            "-c",
            f"import time; print({line(names[0], reason='x')!r}, flush=True); time.sleep(1);"
            f"print({line(names[1], reason='y')!r})",
        ],
    )
    assert seen[1] - seen[0] > 0.5


TERMINATED = """
import sys, time
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.bench import Measurement
from benchmarks.gpu.supervise import supervised

command.ends_its_processes()
sleeps = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
supervised([Measurement("one", print, 60)], time.monotonic() + 60, print, lambda seconds, names: [sys.executable, "-c", sleeps])
"""


@pytest.mark.full
def test_a_run_that_is_terminated_takes_its_worker_with_it():
    with subprocess.Popen([sys.executable, "-c", TERMINATED], cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        worker = int(run.stderr.readline())
        run.terminate()
        assert run.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_a_worker_measures_in_the_order_in_which_it_is_asked(monkeypatch, capsys):
    from benchmarks.gpu import worker

    monkeypatch.setattr(worker, "record_of", lambda one, *given: {"name": one.name})
    monkeypatch.setattr(worker, "is_usable", lambda: True)
    names = [one.name for one in MEASUREMENTS[4:1:-1]]
    worker.main(60, [names[0], "none", *names[1:]])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["begin"] for one in said[::2]] == [one["name"] for one in said[1::2]] == names


def test_a_worker_ends_a_little_before_it_is_stopped():
    given: list[float] = []
    all_of(
        MEASUREMENTS[:1], 60, lambda seconds, names: [given.append(seconds), *process(line(names[0], reason="x"))][1:]
    )
    assert given[0] == pytest.approx(60 - LEAST, abs=5)


def test_what_finds_no_time_is_said():
    records = all_of(MEASUREMENTS, 0)
    assert [record["name"] for record in records] == [one.name for one in MEASUREMENTS]
    assert {record["reason"] for record in records} == {NOT_STARTED}


def test_all_measurements_fit_into_nine_minutes():
    from benchmarks.gpu.__main__ import SECONDS, TESTS

    assert SECONDS <= 540 and sum(one.seconds for one in MEASUREMENTS) <= SECONDS - TESTS + 30
