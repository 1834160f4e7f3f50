"""Launches that begin while the one before them still runs, on Hopper and later GPUs (programmatic dependent launch).

A kernel that is launched so may read at once what was written before its predecessor was launched: that one began when all of
it was done. It waits (`gdc_wait`) before it reads what its predecessor writes, and before it writes anything, because memory
that it was given may have been its predecessor's. It begins when every program of its predecessor has said that it may
(`gdc_launch_dependents`), or has ended. So whoever launches has to know its predecessor: where that wrote what the kernel reads at
once, such as the newest keys, a launch may not begin early.
"""

from functools import cache

import torch

from calib.kernels.dispatch import HOPPER, capability_of


@cache
def begins_early(device: torch.device) -> bool:
    """Whether launches on `device` may begin so."""
    return device.type == "cuda" and capability_of(device) >= HOPPER


def early_launch(early: bool) -> dict[str, bool]:
    """What such a launch is given besides what it is compiled for."""
    return {"launch_pdl": True} if early else {}
