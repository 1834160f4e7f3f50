"""The most memory that something takes, from who knows: the GPU's allocator, or the operating system of this process."""

import ctypes
import gc
from pathlib import Path

import torch

PROCESS = Path("/proc/self")
ANEW = "5"  # written to clear_refs: the highest resident size is that of now (proc(5))
KIB = 1024


class Peak:
    """Bytes in use: on a GPU by tensors, on the CPU resident in this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU's memory that is short."""
        return self.device.type == "cuda"

    def settle(self) -> None:
        """Gives back what is held for nobody, so that what follows is not served from it unseen."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        else:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library alone
            if trim is not None:
                trim(0)

    def held(self) -> int | None:
        """Bytes in use now; None where nobody tells."""
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else resident("VmRSS")

    def begin(self) -> bool:
        """From now on `highest` counts; False where it cannot."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            (PROCESS / "clear_refs").write_text(ANEW)
        except OSError:
            return False
        return True

    def highest(self) -> int | None:
        """The most that was in use since `begin`."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else resident("VmHWM")


def resident(name: str) -> int | None:
    """Bytes of a line of the process's status; None where there is no such line."""
    try:
        lines = (PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((KIB * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
