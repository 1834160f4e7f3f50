"""Launches that start while the previous kernel still runs, on Hopper and later GPUs (programmatic dependent launch).

Such a kernel starts when every program of the previous kernel has called `gdc_launch_dependents` or has ended. It may read
immediately what was written before the previous kernel started. It must call `gdc_wait` before it reads what the previous kernel
writes, and before it writes anything, because its output memory may have been in use by the previous kernel. So the caller has to
know the previous kernel: if that wrote what this one reads before `gdc_wait`, such as the newest keys, it must not start early.
"""

from functools import cache

import torch

from calib.kernels.dispatch import HOPPER, capability_of


@cache
def begins_early(device: torch.device) -> bool:
    """Whether `device` supports programmatic dependent launch: a GPU of compute capability 9.0 or later."""
    return device.type == "cuda" and capability_of(device) >= HOPPER


def early_launch(early: bool) -> dict[str, bool]:
    """Launch options, besides the kernel's constants: `launch_pdl` if the launch may start early."""
    return {"launch_pdl": True} if early else {}
