"""The uniform quantiser with a clip factor (METHODS 0): one rule for min-max (clip 1) and for cell midpoints.

For each group of values, with B bits and 0 < c <= 1:

    m = (max + min) / 2,   h = c (max - min) / 2,   s = 2h / (2^B - 1),   z = m - h
    q = clip(floor((x - z) / s + 1/2), 0, 2^B - 1),   x^ = q s + z

c = 1 is the quantiser of KIVI, GEAR, ZipCache and MiKV; c = 1 - 2^-B puts the levels in the middle of 2^B equal cells,
which at B = 1 is SpeCache's eq. 3. Everything is computed in float32: max - min overflows in float16.
"""

import torch
from torch import Tensor


def grouped(x: Tensor, group: tuple[int, int]) -> Tensor:
    """View of `x [..., T, D]` as `[..., T/g_t, g_t, D/g_c, g_c]`."""
    tokens, channels = x.shape[-2:]
    return x.unflatten(-1, (channels // group[1], group[1])).unflatten(-3, (tokens // group[0], group[0]))


def ungrouped(x: Tensor) -> Tensor:
    """Inverse of `grouped`: `[..., N_t, g_t, N_c, g_c]` -> `[..., T, D]`."""
    return x.flatten(-2).flatten(-3, -2)


def measure(x: Tensor, group: tuple[int, int], bits: int, clip: Tensor | float) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group of `x [..., T, D]`: two float32 tensors `[..., T/g_t, D/g_c]`.

    `clip` is a number or broadcasts against that shape. A group of equal values gets scale 0 and its value as zero point.
    """
    low, high = grouped(x.float(), group).amin((-3, -1)), grouped(x.float(), group).amax((-3, -1))
    # Halved before the sum: float32 inputs near the end of the range must not overflow either.
    middle, half = high / 2 + low / 2, (high / 2 - low / 2) * clip
    scale = half * (2 / (2**bits - 1))
    return scale, torch.where(scale > 0, middle - half, middle)


def quantise(x: Tensor, scale: Tensor, zero: Tensor, group: tuple[int, int], bits: int) -> Tensor:
    """Codes `[..., T, D]` uint8 of `x [..., T, D]` for the stored `scale` and `zero` `[..., T/g_t, D/g_c]` (any float dtype)."""
    step, start = scale.float()[..., :, None, :, None], zero.float()[..., :, None, :, None]
    safe = torch.where(step > 0, step, torch.ones_like(step))  # scale 0: every value is the zero point, code 0
    codes = torch.floor((grouped(x.float(), group) - start) / safe + 0.5).clamp_(0, 2**bits - 1)
    return ungrouped(torch.where(step > 0, codes, torch.zeros_like(codes)).to(torch.uint8))


def dequantise(codes: Tensor, scale: Tensor, zero: Tensor, group: tuple[int, int]) -> Tensor:
    """x^ = q s + z, float32 `[..., T, D]`."""
    step, start = scale.float()[..., :, None, :, None], zero.float()[..., :, None, :, None]
    return ungrouped(grouped(codes.float(), group) * step + start)
