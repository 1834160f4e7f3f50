"""Half-split RoPE and its inverse in plain torch."""

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x [rows, heads, n, D]` by half-split RoPE with `cos` and `sin [..., n, r/2]`; with `-sin`, rotate back."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def unrotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `operation.unrotated`."""
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return rotated(keys.float(), cos, -sin)
