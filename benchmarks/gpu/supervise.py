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

Record = dict[str, Any]


def worker(seconds: float, names: Sequence[str]) -> list[str]:
    """The command of a process that measures."""
    return [sys.executable, "-m", "benchmarks.gpu.worker", str(seconds), *names]


def supervised(
    measurements: Sequence[Measurement],
    until: float,
    say: Callable[[str], None],
    command: Callable[[float, Sequence[str]], list[str]] = worker,
) -> list[Record]:
    """A record of every measurement: `figures` and `details`, or the `reason` why there are none."""
    missing = {one.name: one for one in measurements}
    records: list[Record] = []

    def keep(record: Record) -> None:
        missing.pop(record["name"])
        records.append(record)
        say(f"{record['name']}: {record.get('reason') or record['figures']}")

    while missing and until - time.monotonic() > LEAST:
        _one_process(missing, until, command, keep)
    for name in list(missing):
        keep({"name": name, "reason": "not begun: the time was over"})
    return records


def _one_process(
    missing: dict[str, Measurement],
    until: float,
    command: Callable[[float, Sequence[str]], list[str]],
    keep: Callable[[Record], None],
) -> None:
    """Records of a process until it ends, hangs, or the time is over; always at least one."""
    process = subprocess.Popen(command(until - time.monotonic(), list(missing)), stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    under_way, limit = next(iter(missing)), min(until, time.monotonic() + 3 * GRACE)
    try:
        while True:
            try:
                line = lines.get(timeout=max(0.1, limit - time.monotonic()))
            except queue.Empty:
                keep({"name": under_way, "reason": "stopped: it took longer than it may"})
                return
            if line is None:
                if under_way in missing:
                    keep({"name": under_way, "reason": f"its process ended with status {process.wait()}"})
                return
            said = _json(line)
            if "begin" in said:
                under_way = said["begin"]
                limit = min(until, time.monotonic() + missing[under_way].seconds + GRACE)
            elif said.get("name") in missing:
                keep(said)
                if not missing:
                    return
                under_way, limit = next(iter(missing)), min(until, time.monotonic() + GRACE)
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
