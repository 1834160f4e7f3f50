"""A tensor's bytes, for checksums."""

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a CPU tensor, little endian and row-major."""
    # `as_strided`, because a single number counts as contiguous whatever its stride is.
    found: memoryview = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
    return found
