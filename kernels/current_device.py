"""Sets the current CUDA device for a launch: Triton launches on the current device, not on that of the tensors."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

_ALREADY = nullcontext()


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which the tensor's device is the current one; does nothing on a machine with at most one GPU."""
    return torch.cuda.device_of(tensor) if _several() else _ALREADY


@cache
def _several() -> bool:
    return torch.cuda.device_count() > 1
