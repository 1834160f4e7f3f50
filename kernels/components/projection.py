"""Data class of a calibrated basis with integer entries, as the kernel of `triton.py` reads it."""

from dataclasses import dataclass

from torch import Tensor

# Bits of |x - mean| in units of its channel: with 16-bit entries a sum over thousands of channels is below 2^53.
TOKEN_BITS = 22


@dataclass(frozen=True, eq=False)
class Projection:
    """y = scale * (clamp(round((x - mean) / unit)) @ into): a product of integers, the first up to 2^`TOKEN_BITS` in magnitude.

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
        """The tensors in the order of the fields."""
        return self.mean, self.unit, self.into, self.scale
