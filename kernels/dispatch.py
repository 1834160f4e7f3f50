"""Which form of an operation runs: plain torch (`reference.py`), Triton (`triton.py`) or C (`cpu.py`). Callers do not ask.

Each operation has a function in its `operation.py` that takes the one or the other, by the device first and then by what
its kernel serves (dtypes, widths; its README says what). Both give the same result: equal bits where bits are stored,
float32 rounding elsewhere. `CALIB_KERNELS=reference` or `=triton` forces either; on a CPU Triton runs in its interpreter,
for tests.
"""

import os
import threading
from functools import lru_cache
from importlib.util import find_spec

import torch

VARIABLE = "CALIB_KERNELS"

# The first GPUs whose matrix instructions take what the kernels give them.
CAPABILITY = (8, 0)
AMPERE, HOPPER = (8, 0), (9, 0)

# GPUs of workstations and some servers (RTX 3090, A10, 4090, L4, L40S, 5090): a program has at most 99 KiB of shared memory there,
# 163 on an A100 and 227 on an H100 (CUDA programming guide, "Compute Capabilities").
LITTLE_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))

_here = threading.local()  # what `OneChoice` knows


def prefers_triton(device: torch.device) -> bool:
    """Whether tensors on `device` go to Triton, where the operation's kernel serves them.

    Raises RuntimeError where the variable forces what cannot run.
    """
    known: dict[torch.device, bool] | None = getattr(_here, "known", None)
    if known is None:
        return _chosen(device)
    if device not in known:
        known[device] = _chosen(device)
    return known[device]


class OneChoice:
    """Within it a device that is not `known` is asked about once, in this thread: a layer's work is many operations, and reading
    the variable for each is a tenth of what they take the host."""

    def __init__(self, known: dict[torch.device, bool]) -> None:
        self.known = known

    def __enter__(self) -> None:
        self.outer = getattr(_here, "known", None)
        _here.known = self.known

    def __exit__(self, *_: object) -> None:
        _here.known = self.outer


def _chosen(device: torch.device) -> bool:
    """What the variable says, and where it says nothing the device."""
    forced = os.environ.get(VARIABLE, "")
    if not forced:
        return _prefers_triton(device)
    if forced not in ("reference", "triton"):
        raise RuntimeError(
            f"{VARIABLE} must be 'reference' or 'triton', got {forced!r}; unset it to leave the choice to calib"
        )
    if forced == "reference":
        return False
    _check_forced(device)
    return True


def prefers_compiled(device: torch.device) -> bool:
    """Whether tensors on `device` go to C that is compiled for it, where there is a compiler and nothing is forced or traced."""
    return device.type == "cpu" and not os.environ.get(VARIABLE) and not torch.compiler.is_compiling()


def _check_forced(device: torch.device) -> None:
    if not _installed():
        raise RuntimeError(f"{VARIABLE}=triton, but triton is not installed; install it or unset {VARIABLE}")
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return
    raise RuntimeError(
        f"{VARIABLE}=triton, but the tensors are on {device.type!r}; move the model to a GPU, or set TRITON_INTERPRET=1"
    )


@lru_cache
def _installed() -> bool:
    return find_spec("triton") is not None


@lru_cache
def _prefers_triton(device: torch.device) -> bool:
    return device.type == "cuda" and _serves(device.index)


@lru_cache
def _serves(index: int | None) -> bool:
    return _installed() and torch.version.hip is None and torch.cuda.get_device_capability(index) >= CAPABILITY


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; Hopper's for any other device, whose kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER
