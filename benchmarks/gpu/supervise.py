"""Sees to it that every measurement ends: in time, and without taking the others with it."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.bench import Measurement

# Seconds beside a measurement's own until it counts as hanging: its last turn, and the start of a process.
GRACE = 20
LEAST = 10  # seconds without which none is begun
STOPPED = "stopped at its time limit"

Record = dict[str, Any]


def worker(seconds: float, names: Sequence[str]) -> list[str]:
    """The command of a process that measures."""
    return [sys.executable, "-m", "benchmarks.gpu.worker", str(seconds), *names]


def supervised(
    measurements: Sequence[Measurement],
    until: float,
    keep: Callable[[Record], None],
    command: Callable[[float, Sequence[str]], list[str]] = worker,
) -> None:
    """Calls `keep` with a record of every measurement as soon as there is one: `figures` and `details`, or the `reason` why
    there are none."""
    missing = {one.name: one for one in measurements}

    def found(record: Record) -> None:
        missing.pop(record["name"])
        keep(record)

    while missing and until - time.monotonic() > LEAST:
        _one_process(missing, until, command, found)
    for name in list(missing):
        found({"name": name, "reason": "not begun: the time was over"})


def _one_process(
    missing: dict[str, Measurement],
    until: float,
    command: Callable[[float, Sequence[str]], list[str]],
    keep: Callable[[Record], None],
) -> None:
    """Records of a process until it ends, hangs, or the time is over.

    What it dies of or hangs in is put down to the measurement that it had begun, and between two of them to none. A process that
    began none costs the first one: another would end the same way, and there must be an end.
    """
    process = subprocess.Popen(command(until - time.monotonic(), list(missing)), stdout=subprocess.PIPE, text=True)
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
        process.wait()


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _json(line: str) -> Record:
    """A line of a worker; what a library prints beside is nothing."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
