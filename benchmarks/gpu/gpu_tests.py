"""The tests that need a GPU, in a process of their own, within their share of the time."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = "tests/gpu"
WORKERS = 6  # processes, each with a context of its own on the device
ALONE = 30  # seconds below which several processes would not be worth their start


def run(seconds: float, folder: str = FOLDER) -> dict[str, Any]:
    """Counts by outcome, the failures' lines, and one `line` that says it all."""
    if find_spec("pytest") is None:
        return {"line": "pytest is missing: no test was run", "failed": []}
    # The tests are written for the interpreter too; here kernels are compiled.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "pytest", "-rf", "-p", "no:cacheprovider", "--tb=line", folder]
    if find_spec("xdist") is not None and seconds > ALONE:  # compiling is the processor's work: several at once
        command += ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(1, seconds)
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return {"line": f"stopped after {seconds:.0f} s", "failed": _failed(said)}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1] if lines else "")
    counts = {"failed_tests" if what == "failed" else what: int(count) for count, what in found}
    line = (
        lines[-1].strip("= ") if lines else f"pytest ended with status {done.returncode}: {done.stderr.strip()[-200:]}"
    )
    return {"line": line, "status": done.returncode, **counts, "failed": _failed(done.stdout)}


def _failed(said: str) -> list[str]:
    return [line[:300] for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
