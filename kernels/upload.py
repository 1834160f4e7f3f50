"""Copies small lists of host numbers to a device without synchronising."""

import torch
from torch import Tensor


def upload(
    numbers: list[int] | list[float] | list[list[int]] | list[list[float]] | bytes | Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns a small host list, bytes or tensor as a tensor of `dtype` on `device`; a copy to a GPU is asynchronous.

    Raises RuntimeError while a CUDA graph is recorded: torch would record the copy, and every replay would read these numbers
    again.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("numbers are uploaded while a CUDA graph is recorded; give them to the step as tensors")
    if isinstance(numbers, bytes):
        numbers = list(numbers)
    tensor = numbers.to(dtype) if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if tensor.device == device else tensor.to(device)
