"""Runs the tests that need a GPU in a separate process within a time limit; failures are reported even if it is cut off."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
FOLDER = "tests/gpu"
WHOLE_MODELS = ("test_generate.py", "test_model_step.py")  # run last, after the tests of kernels
WORKERS = 12  # most processes, each with its own context on the device
ALONE = 30  # with fewer seconds, starting several processes is not worthwhile
EACH = 90  # most seconds of one test, if pytest-timeout is installed
CLOSING = 10  # seconds for pytest to print its summary after an interrupt

# The lines of `pytest -vv` for one test, with several processes or one, and pytest's last line.
BY_WORKER = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (.+?) *$")
ALONE_LINE = re.compile(r"^(\S+::.+) (PASSED|FAILED|SKIPPED|ERROR)\b.*$")
LOST = "the device has failed in this test"  # as in tests/support/gpu/lost_device.py
LAST = re.compile(r"\d+ (passed|failed|skipped|error).* in [\d.]+s")


def command(seconds: float, *paths: str) -> list[str]:
    """Returns the pytest command, which prints a line for each test as soon as it is over."""
    found = [sys.executable, "-m", "pytest", "-vv", "-rf", "-p", "no:cacheprovider", "--tb=line", *paths]
    if find_spec("pytest_timeout") is not None:
        found += ["--timeout", str(EACH)]
    if find_spec("xdist") is not None and seconds > ALONE:  # compiling is the processor's work: several at once
        found += ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    return found


def files() -> list[str]:
    """Returns the files of tests, in the order in which they run."""
    found = sorted((ROOT / FOLDER).glob("test_*.py"), key=lambda file: (file.name in WHOLE_MODELS, file.name))
    return [str(file.relative_to(ROOT)) for file in found]


def run(seconds: float, log: Path, *paths: str) -> dict[str, Any]:
    """Runs the tests; returns counts by outcome, the lines of failures, and a summary as `line`. `log` gets pytest's output.

    If a test makes the device fail, which ends its process, the tests after it run in another one.
    """
    if find_spec("pytest") is None:
        return {"line": "pytest is missing: no test was run", "failed": []}
    until, lost = time.monotonic() + seconds, 0
    log.write_text("")
    while True:
        left = max(1, until - time.monotonic())
        before = [name for _, name in _tests_in(log.read_text())]
        with log.open("a") as said:
            words = [*command(left, *paths), *(f"--deselect={name}" for name in before)]
            status, cut = _one_process(words, left, said)
        text = log.read_text()
        if cut or text.count(f"Interrupted: {LOST} !") == lost or len([*_tests_in(text)]) == len(before):
            break
        lost += 1
    why = [f"stopped after {seconds:.0f} s"] * cut + [f"the device failed in {lost} test{'s' * (lost > 1)}"] * (
        lost > 0
    )
    return outcome(text, status or min(lost, 1), ", ".join(why) or None)


def _one_process(words: list[str], seconds: float, said: IO[str]) -> tuple[int, bool]:
    """Runs pytest for at most `seconds`; returns its exit status, and whether it was stopped."""
    # The tests also run in Triton's interpreter; here kernels are compiled.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
    )
    cut = False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        cut = True
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLOSING)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    return status, cut


def _tests_in(said: str) -> Iterator[tuple[str, str]]:
    """Yields outcome and name of every test that is over, from pytest's output."""
    for line in said.splitlines():
        if by_worker := BY_WORKER.match(line):
            yield by_worker[1], by_worker[2]
        elif alone := ALONE_LINE.match(line):
            yield alone[2], alone[1]


def outcome(said: str, status: int, cut: str | None) -> dict[str, Any]:
    """Returns the results in pytest's output `said`, also of several processes or an unfinished one; `cut` then tells why."""
    counts: Counter[str] = Counter()
    names: list[str] = []
    for what, name in _tests_in(said):
        counts["failed_tests" if what == "FAILED" else what.lower()] += 1
        if what in ("FAILED", "ERROR"):
            names.append(f"{what} {name}")
    # pytest's own summary has the reasons; a killed run has no summary.
    summary = [line[:300] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = summary if len(summary) >= len(names) else names
    last = [line.strip("= ") for line in said.splitlines() if LAST.search(line)]
    line = last[-1] if last else f"pytest ended with status {status}: {said.strip()[-200:] or 'it said nothing'}"
    if cut is not None:
        told = [f"{count} {what.removesuffix('_tests')}" for what, count in counts.items()]
        line = f"{cut}: {', '.join(told) or 'no test was over'}"
    return {"line": line, "status": status, **counts, "failed": failed}
