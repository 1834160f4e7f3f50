"""`make gpu`: runs the tests that need a GPU, then every measurement; prints the table of targets and writes one JSON file.

    python -m benchmarks.gpu [--only NAME ...] [--no-tests | --tests PATH ...] [--seconds 530] [--output FOLDER] [--list]

A run takes at most nine minutes. A measurement that fails, or has no time left, is a line in the table; the others go on. The file
is written after every record, in `--output`, else in the folder of the variable OUT, else in benchmarks/results; the tests' output
is written beside it. Without a GPU it prints one line, exits with status 1 and writes nothing. `CALIB_GPU_PROFILE=1` adds the time
of each kernel to the file.
"""

import argparse
import signal
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEEDED = ("torch", "transformers", "triton", "safetensors", "yaml")
SECONDS = 530  # default limit of a whole run
TESTS = 110  # most of these seconds for the tests, if measurements follow


def refused(names_only: bool = False) -> str | None:
    """Returns in one line why nothing can be measured here, or None; with `names_only` no GPU is needed."""
    missing = [name for name in NEEDED if find_spec(name) is None and name != "triton"]
    if missing:
        return f"make gpu needs {', '.join(missing)}, which this Python ({sys.executable}) does not have"
    if names_only:
        return None
    import torch

    if not torch.cuda.is_available():
        return "make gpu needs an NVIDIA GPU that torch can use, and there is none; nothing was measured"
    if find_spec("triton") is None:
        return f"make gpu needs triton, which this Python ({sys.executable}) does not have"
    return None


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--only", nargs="+", metavar="NAME", help="these measurements, in this order")
    found.add_argument("--list", action="store_true", help="the names of all measurements, and nothing else")
    which = found.add_mutually_exclusive_group()
    which.add_argument("--no-tests", action="store_true", help="measure only")
    which.add_argument("--tests", nargs="+", metavar="PATH", help="these tests only, and no measurement")
    found.add_argument("--seconds", type=float, default=SECONDS, help="for everything (530)")
    found.add_argument("--output", type=Path, help="folder of the JSON file (OUT, or benchmarks/results)")
    return found


def ends_its_processes() -> None:
    """Lets a SIGTERM, such as that of `timeout`, also end the tests or the worker: they would keep the GPU."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def main() -> int:
    """Returns the exit status: 0, also if targets are missed; 1 if a test failed or nothing could be measured; 2 for usage."""
    asked = parser().parse_args()
    start = time.monotonic()
    if (why := refused(asked.list)) is not None:
        print(why, file=sys.stderr)
        return 1
    from benchmarks.gpu import gpu_tests, report
    from benchmarks.gpu.supervise import supervised
    from benchmarks.gpu.targets import MEASUREMENTS, ON_REQUEST

    names = {one.name: one for one in (*MEASUREMENTS, *ON_REQUEST)}
    if asked.list:
        print(*names, sep="\n")
        return 0
    if strange := [name for name in asked.only or [] if name not in names]:
        print(f"--only takes of: {', '.join(names)}; got {strange}", file=sys.stderr)
        return 2
    if strange := [path for path in asked.tests or [] if not Path(path.split("::")[0]).exists()]:
        print(f"--tests takes files and folders; there is no {strange[0]!r}", file=sys.stderr)
        return 2
    ends_its_processes()
    chosen = [names[name] for name in dict.fromkeys(asked.only)] if asked.only else MEASUREMENTS
    device = report.device_of()
    print(f"{device['name']}, {device['memory_bytes'] / 2**30:.0f} GiB; {report.versions()}", flush=True)
    try:
        run = report.Run(device, report.folder_of(asked.output))
    except OSError as error:
        print(f"the run cannot be kept: {error}; name another folder with --output", file=sys.stderr)
        return 2
    if not asked.no_tests:
        seconds = asked.seconds if asked.tests else min(TESTS, asked.seconds)
        run.tests = gpu_tests.run(seconds, run.file.with_suffix(".tests.log"), *(asked.tests or gpu_tests.files()))
        run.keep()
    print(f"tests/gpu: {run.tests.get('line', 'not run')}", *run.tests.get("failed", []), sep="\n", flush=True)

    def keep(record: Mapping[str, Any]) -> None:
        run.add(record)
        print(f"{record['name']}: {record.get('reason') or record['figures']}", flush=True)

    if not asked.tests:
        supervised(chosen, start + asked.seconds, keep)
        print("\n" + report.plain(run.records) + "\n")
    print(f"{run.file} holds the run ({time.monotonic() - start:.0f} s)")
    return 1 if run.tests.get("failed") or run.tests.get("status", 0) not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
