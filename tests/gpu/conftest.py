"""Tests of the compiled kernels on a CUDA device: `make gpu`. Elsewhere they are skipped, for want of "a CUDA device".

`CALIB_GPU_TESTS=cpu` runs the same tests in Triton's interpreter, on inputs a sixteenth as long, to see that they are right.
"""

import os
from pathlib import Path

import pytest
import torch

DRY = os.environ.get("CALIB_GPU_TESTS") == "cpu"


def pytest_collection_modifyitems(items):
    """A named capability instead of a failure."""
    if DRY:
        return
    reason = None
    if not torch.cuda.is_available():
        reason = "needs a CUDA device"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "needs a CUDA device and compiled kernels: make gpu"
    for item in items:
        if reason and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device():
    """Where the kernels run."""
    return torch.device("cpu" if DRY else "cuda")


@pytest.fixture(scope="session")
def times():
    """How many times as long as in the interpreter inputs are."""
    return 1 if DRY else 16


@pytest.fixture(autouse=True)
def _through_triton(monkeypatch):
    """What no kernel serves would be plain torch otherwise, and prove nothing."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
