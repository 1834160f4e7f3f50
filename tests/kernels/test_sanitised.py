"""The C kernels under gcc's sanitizers: no read or write outside a tensor, and nothing whose result C leaves undefined."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUNTIME = ("libasan.so", "libubsan.so")  # loaded before Python, whose memory they then watch
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
# Every source: keys by codes, before RoPE with and without sizes, exact tokens, trellis-coded levels.
FILES = [f"tests/kernels/{name}.py" for name in ("test_attend_cpu", "test_attend_pages_cpu", "test_trellis_cpu")]
SIZE = "tests/kernels/test_attend_cpu.py::test_a_library_is_of_one_number_of_query_rows"  # sanitised code is larger


def found(name: str) -> str | None:
    """Path of a library of gcc, if gcc is there and has it."""
    if shutil.which("gcc") is None:
        return None
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return path if Path(path).is_absolute() else None


@pytest.mark.full
@pytest.mark.skipif(not all(map(found, RUNTIME)), reason="gcc's sanitizers are not installed")
def test_nothing_outside_a_tensor_is_read_or_written(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec gcc "$@" -O1 -g {SANITIZERS}\n')
    compiler.chmod(0o700)
    says = f"log_path={tmp_path / 'report'}"
    environment = {
        **os.environ,
        "CC": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": " ".join(filter(None, map(found, RUNTIME))),
        "ASAN_OPTIONS": f"{says}:detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": f"{says}:print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "pytest", "--sample", "-p", "no:cacheprovider", f"--deselect={SIZE}", *FILES]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    reports = "".join(report.read_text()[:3000] for report in tmp_path.glob("report*"))
    assert done.returncode == 0, reports or done.stdout[-3000:]
    assert len([*(tmp_path / "calib" / "compiled").iterdir()]) > 10, "plain torch ran instead"
