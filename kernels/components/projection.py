"""A basis as the kernel of `triton.py` reads it."""

from dataclasses import dataclass

from torch import Tensor

# Of |x - mean| in its channel's unit: with entries of 16 bits a sum over thousands of channels is below 2^53.
TOKEN_BITS = 22


@dataclass(frozen=True, eq=False)
class Projection:
    """y = scale * (clamp(round((x - mean) / unit)) @ into), whole numbers up to 2^`TOKEN_BITS` times whole numbers.

    Args:
        mean: float32 `[kv_heads, 1, D]`.
        unit: float32 `[kv_heads, 1, D]`, powers of two.
        into: int16 `[kv_heads, D, N]`.
        scale: float32 `[kv_heads, 1, N]`, powers of two.
    """

    mean: Tensor
    unit: Tensor
    into: Tensor
    scale: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In this order."""
        return self.mean, self.unit, self.into, self.scale
