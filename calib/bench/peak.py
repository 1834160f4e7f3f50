"""Measures peak memory: from PyTorch's allocator on a GPU, from the operating system for this process on a CPU."""

import ctypes
import gc
from pathlib import Path

import torch

PROCESS = Path("/proc/self")
ANEW = "5"  # written to clear_refs: resets the peak resident size to the current one (proc(5))
KIB = 1024


class Peak:
    """Memory in use and its peak, in bytes: of tensors on a GPU, or the resident size of this process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def on_gpu(self) -> bool:
        """Whether GPU memory is measured."""
        return self.device.type == "cuda"

    def settle(self) -> None:
        """Frees unused cached memory, so that later allocations do not reuse it without showing in the peak."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        else:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only the GNU C library has it
            if trim is not None:
                trim(0)

    def held(self) -> int | None:
        """Returns the bytes in use now; None if they cannot be measured."""
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else resident("VmRSS")

    def begin(self) -> bool:
        """Resets the peak that `highest` returns; returns False if that is impossible."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            (PROCESS / "clear_refs").write_text(ANEW)
        except OSError:
            return False
        return True

    def highest(self) -> int | None:
        """Returns the peak of the bytes in use since `begin`; None if it cannot be measured."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else resident("VmHWM")


def resident(name: str) -> int | None:
    """Returns the bytes in the line `name` of the process's status; None if there is no such line."""
    try:
        lines = (PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((KIB * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
