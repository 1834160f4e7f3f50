"""Numbers of the host on their way to a device, which the host does not wait for."""

import torch
from torch import Tensor


def upload(
    numbers: list[int] | list[float] | list[list[int]] | list[list[float]] | bytes | Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A small list or tensor of the host on the device, without waiting for the device."""
    if isinstance(numbers, bytes):
        numbers = list(numbers)
    tensor = numbers.to(dtype) if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if tensor.device == device else tensor.to(device)
