"""`make gpu`: the tests that need a GPU, then every measurement, the table of targets and one JSON file.

    python -m benchmarks.gpu [--only NAME ...] [--no-tests] [--seconds 530] [--output FOLDER]

At most nine minutes in all. What fails, or finds no time, is a line in the table; the rest goes on. Without a GPU: one line,
exit status 1, and nothing is written. `CALIB_GPU_PROFILE=1` adds each kernel's own time to the file.
"""

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("torch", "transformers", "triton", "safetensors", "yaml")
SECONDS = 530  # of the nine minutes that one run may take
TESTS = 110  # of these, at most, for the tests


def refused() -> str | None:
    """Why nothing can be measured here, in one line."""
    missing = [name for name in NEEDED if find_spec(name) is None and name != "triton"]
    if missing:
        return f"make gpu needs {', '.join(missing)}, which this Python ({sys.executable}) does not have"
    import torch

    if not torch.cuda.is_available():
        return "make gpu needs an NVIDIA GPU that torch can use, and there is none; nothing was measured"
    if find_spec("triton") is None:
        return f"make gpu needs triton, which this Python ({sys.executable}) does not have"
    return None


def main() -> int:
    """The exit status: 0, also where targets are missed; 1 where a test failed or nothing could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these measurements")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (530)")
    parser.add_argument("--output", type=Path, help="folder of the JSON file (benchmarks/results)")
    asked = parser.parse_args()
    start = time.monotonic()
    if (why := refused()) is not None:
        print(why, file=sys.stderr)
        return 1
    from benchmarks.gpu import gpu_tests, report
    from benchmarks.gpu.supervise import supervised
    from benchmarks.gpu.targets import MEASUREMENTS

    chosen = [one for one in MEASUREMENTS if asked.only is None or one.name in asked.only]
    if not chosen or (asked.only and len(chosen) < len(set(asked.only))):
        print(f"--only takes of: {', '.join(one.name for one in MEASUREMENTS)}; got {asked.only}", file=sys.stderr)
        return 2
    device = report.device_of()
    print(f"{device['name']}, {device['memory_bytes'] / 2**30:.0f} GiB; {report.versions()}", flush=True)
    tests = {"line": "not run", "failed": []} if asked.no_tests else gpu_tests.run(min(TESTS, asked.seconds))
    print(f"tests/gpu: {tests['line']}", *tests["failed"], sep="\n", flush=True)
    records = supervised(chosen, start + asked.seconds, lambda line: print(line, flush=True))
    print("\n" + report.plain(records) + "\n")
    run = report.run_of(device, tests, records, time.monotonic() - start)
    file = report.keep(run, asked.output or report.RESULTS)
    print(f"{file} holds the run ({run['seconds']:.0f} s)")
    return 1 if tests["failed"] or tests.get("status", 0) not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
