"""Runs measurements in worker processes with time limits, so that one that hangs or crashes does not stop the others."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.gpu.bench import Measurement

# Seconds beyond a measurement's own before it counts as hanging: for its last turn, and the start of a process.
GRACE = 20
LEAST = 10  # with fewer seconds left, no measurement is started
STOPPED = "stopped at its time limit"
NOT_STARTED = "not started: no time was left"

Record = dict[str, Any]


def worker(seconds: float, names: Sequence[str]) -> list[str]:
    """Returns the command of a worker process."""
    return [sys.executable, "-m", "benchmarks.gpu.worker", str(seconds), *names]


def supervised(
    measurements: Sequence[Measurement],
    until: float,
    keep: Callable[[Record], None],
    command: Callable[[float, Sequence[str]], list[str]] = worker,
) -> None:
    """Runs the measurements until the time `until`; calls `keep` with each record as soon as there is one.

    A record has `figures` and `details`, or the `reason` why there are none.
    """
    missing = {one.name: one for one in measurements}

    def found(record: Record) -> None:
        missing.pop(record["name"])
        keep(record)

    while missing and until - time.monotonic() > LEAST:
        _one_process(missing, until, command, found)
    for name in list(missing):
        found({"name": name, "reason": NOT_STARTED})


def _one_process(
    missing: dict[str, Measurement],
    until: float,
    command: Callable[[float, Sequence[str]], list[str]],
    keep: Callable[[Record], None],
) -> None:
    """Keeps the records of one worker process until it ends, hangs, or the time is over.

    A crash or a hang is recorded for the measurement that had begun; between two measurements for none. If the process began none,
    it is recorded for the first one, so that restarts come to an end.
    """
    # The worker stops taking turns a little before it is stopped itself, so that figures taken so far are reported.
    seconds = until - time.monotonic() - LEAST
    process = subprocess.Popen(command(seconds, list(missing)), stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    under_way: str | None = next(iter(missing))
    limit = min(until, time.monotonic() + 3 * GRACE)
    try:
        while True:
            try:
                line = lines.get(timeout=max(0.1, limit - time.monotonic()))
            except queue.Empty:
                if under_way is not None:
                    keep({"name": under_way, "reason": STOPPED})
                return
            if line is None:
                if under_way is not None:
                    keep({"name": under_way, "reason": f"its process ended with status {process.wait()}"})
                return
            said = _json(line)
            if said.get("begin") in missing:
                under_way = said["begin"]
                limit = min(until, time.monotonic() + missing[under_way].seconds + GRACE)
            elif said.get("name") in missing:
                keep(said)
                if not missing:
                    return
                under_way, limit = None, min(until, time.monotonic() + GRACE)
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps a killed process
            process.wait(GRACE)


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _json(line: str) -> Record:
    """Returns a worker's line as a record; empty for other output, such as a library's."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
