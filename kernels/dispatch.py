"""Chooses the implementation of an operation: plain torch (`reference.py`), Triton (`triton.py`) or C (`cpu.py`).

Callers call the functions in an operation's `operation.py`, which choose by the device, then by what the kernel supports (dtypes,
widths; listed in the operation's README). All implementations give the same result: stored bits are equal, other results differ by
float32 rounding. `CALIB_KERNELS=reference` or `=triton` forces one; on a CPU, Triton runs in its interpreter, for tests.
"""

import os
import threading
from functools import lru_cache
from importlib.util import find_spec

import torch

VARIABLE = "CALIB_KERNELS"

# Least compute capability whose matrix instructions take the operand types of the kernels.
CAPABILITY = (8, 0)
AMPERE, HOPPER = (8, 0), (9, 0)

# GPUs of workstations and some servers (RTX 3090, A10, 4090, L4, L40S, 5090): a program has at most 99 KiB of shared memory there,
# 163 on an A100 and 227 on an H100 (CUDA programming guide, "Compute Capabilities").
LITTLE_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))

_here = threading.local()  # `known` of the active `OneChoice`


def prefers_triton(device: torch.device) -> bool:
    """Whether operations on `device` use their Triton kernel if it supports the tensors.

    Raises RuntimeError if CALIB_KERNELS has another value than 'reference' and 'triton', or forces Triton where it cannot run.
    """
    known: dict[torch.device, bool] | None = getattr(_here, "known", None)
    if known is None:
        return _chosen(device)
    if device not in known:
        known[device] = _chosen(device)
    return known[device]


class OneChoice:
    """Context that caches `prefers_triton` by device in `known`, for this thread. A layer runs many operations, and reading the
    environment variable for each took a tenth of their host time."""

    def __init__(self, known: dict[torch.device, bool]) -> None:
        self.known = known

    def __enter__(self) -> None:
        self.outer = getattr(_here, "known", None)
        _here.known = self.known

    def __exit__(self, *_: object) -> None:
        _here.known = self.outer


def _chosen(device: torch.device) -> bool:
    """`prefers_triton` without a cache: by CALIB_KERNELS if it is set, else by the device."""
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
    """Whether operations on `device` use compiled C: on a CPU, if CALIB_KERNELS is not set and torch.compile is not tracing. That
    there is a compiler is not checked here."""
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
    """Compute capability of a GPU; that of Hopper for any other device, where kernels run in Triton's interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER
