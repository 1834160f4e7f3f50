"""Sums that are exact in any order: the last bit of a rounded sum depends on how many tokens share a matrix product, and codes
must not.

Whole numbers of 22 bits have products of 44 bits, and 512 of these a sum below 2^53, which float64 holds exactly.
"""

import torch
from torch import Tensor

WHOLE_BITS = 22


def whole_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds `x [..., tokens, D]` to multiples of a unit for each token, a power of two of which no entry has more than 2^22:
    float64 whole numbers shaped like x, and the units `[..., tokens, 1]`, by which they are to be multiplied."""
    largest = x.abs().amax(-1, keepdim=True).double()
    mantissa, exponent = torch.frexp(largest.clamp(min=2.0**-126))
    unit = torch.ldexp(torch.ones_like(mantissa), exponent - WHOLE_BITS)
    return (x.double() / unit).round_(), unit
