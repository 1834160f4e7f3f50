"""Triton launches on the current device."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

_ALREADY = nullcontext()


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, where there are several to choose from."""
    return torch.cuda.device_of(tensor) if _several() else _ALREADY


@cache
def _several() -> bool:
    return torch.cuda.device_count() > 1
