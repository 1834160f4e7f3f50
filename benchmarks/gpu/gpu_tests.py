"""Runs the tests that need a GPU in a separate process within a time limit; failures are reported even if it is cut off."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = "tests/gpu"
WORKERS = 12  # most processes, each with its own context on the device
ALONE = 30  # with fewer seconds, starting several processes is not worthwhile
EACH = 90  # most seconds of one test, if pytest-timeout is installed
CLOSING = 10  # seconds for pytest to print its summary after an interrupt

# The lines of `pytest -vv` for one test, with several processes or one, and pytest's last line.
BY_WORKER = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (.+?) *$")
ALONE_LINE = re.compile(r"^(\S+::.+) (PASSED|FAILED|SKIPPED|ERROR)\b.*$")
LAST = re.compile(r"\d+ (passed|failed|skipped|error).* in [\d.]+s")


def command(seconds: float, *paths: str) -> list[str]:
    """Returns the pytest command, which prints a line for each test as soon as it is over."""
    found = [sys.executable, "-m", "pytest", "-vv", "-rf", "-p", "no:cacheprovider", "--tb=line", *paths]
    if find_spec("pytest_timeout") is not None:
        found += ["--timeout", str(EACH)]
    if find_spec("xdist") is not None and seconds > ALONE:  # compiling is the processor's work: several at once
        found += ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    return found


def run(seconds: float, log: Path, *paths: str) -> dict[str, Any]:
    """Runs the tests; returns counts by outcome, the lines of failures, and a summary as `line`. `log` gets pytest's output."""
    if find_spec("pytest") is None:
        return {"line": "pytest is missing: no test was run", "failed": []}
    # The tests also run in Triton's interpreter; here kernels are compiled.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as said:
        process = subprocess.Popen(
            command(seconds, *paths),
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        cut = False
        try:
            process.wait(max(1, seconds))
        except subprocess.TimeoutExpired:
            cut = True
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLOSING)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    return outcome(log.read_text(), status, f"stopped after {seconds:.0f} s" if cut else None)


def outcome(said: str, status: int, cut: str | None) -> dict[str, Any]:
    """Returns the results in pytest's output `said`, also of an unfinished run; `cut` is the reason it was stopped, if it was."""
    counts: Counter[str] = Counter()
    names: list[str] = []
    for line in said.splitlines():
        if by_worker := BY_WORKER.match(line):
            what, name = by_worker.groups()
        elif alone := ALONE_LINE.match(line):
            name, what = alone.groups()
        else:
            continue
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
