"""Tests of the compiled kernels on a CUDA device: `make gpu`. Without one they are skipped.

`CALIB_GPU_TESTS=cpu` runs the same tests in Triton's interpreter, on inputs a sixteenth as long, to check the tests themselves.
"""

import os
from pathlib import Path

import pytest
import torch
from gpu.lost_device import pytest_runtest_makereport as pytest_runtest_makereport

DRY = os.environ.get("CALIB_GPU_TESTS") == "cpu"


def pytest_collection_modifyitems(items):
    """Skip the tests of this folder, with the reason, if there is no CUDA device or kernels would be interpreted."""
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
    """The device on which the kernels run."""
    return torch.device("cpu" if DRY else "cuda")


@pytest.fixture(scope="session")
def times():
    """Length of the inputs, in multiples of those for the interpreter."""
    return 1 if DRY else 16


@pytest.fixture(autouse=True)
def _through_triton(monkeypatch):
    """Run the Triton kernels, also on a CPU, where plain torch would run otherwise and the tests would show nothing."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
