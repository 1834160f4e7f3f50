"""Runs measurements in a separate process and prints each result as one line of JSON, which `supervise` reads.

python -m benchmarks.gpu.worker SECONDS NAME ...
"""

import gc
import json
import sys
import time
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Measurement, NotMeasured
from benchmarks.gpu.graphs import one_line
from benchmarks.gpu.sizes import REAL, Sizes
from benchmarks.gpu.targets import MEASUREMENTS, ON_REQUEST


def record_of(measurement: Measurement, device: torch.device, sizes: Sizes, left: float) -> dict[str, Any]:
    """Runs a measurement and returns its record: figures and details, or the reason why there are none, in one line."""
    start = time.monotonic()
    bench = Bench(device, sizes, start + min(measurement.seconds, left))
    record: dict[str, Any] = {"name": measurement.name}
    try:
        found = measurement.run(bench)
        record |= {"figures": found.figures, "details": found.details}
    except NotMeasured as error:
        record["reason"] = str(error)
    except Exception as error:  # any error is recorded, so that the other measurements can go on
        record["reason"] = one_line(error)
    record["seconds"] = round(time.monotonic() - start, 1)
    return record


def is_usable() -> bool:
    """Returns whether the device still works: after an illegal access nothing more can be measured in this process."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main(seconds: float, names: list[str]) -> None:
    """Runs the measurements in the order of `names` within `seconds`; exits with status 1 if the device fails."""
    until, known = time.monotonic() + seconds, {one.name: one for one in (*MEASUREMENTS, *ON_REQUEST)}
    for measurement in (known[name] for name in names if name in known):
        print(json.dumps({"begin": measurement.name}), flush=True)
        record = record_of(measurement, torch.device("cuda", 0), REAL, until - time.monotonic())
        gc.collect()
        print(json.dumps(record), flush=True)
        if not is_usable():
            sys.exit(1)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
