"""The uniform quantiser with a clip factor: one rule for min-max quantisation (c = 1) and for levels at cell midpoints.

For each group of values, with B bits and 0 < c <= 1:

    m = (max + min) / 2,   h = c (max - min) / 2,   s = 2h / (2^B - 1),   z = m - h
    q = clip(floor((x - z) / s + 1/2), 0, 2^B - 1),   x^ = q s + z

c = 1 is the quantiser of KIVI, GEAR, ZipCache and MiKV; c = 1 - 2^-B puts the levels in the middle of 2^B equal cells,
which at B = 1 is SpeCache's eq. 3. Everything is computed in float32: max - min overflows in float16.
"""

import torch
from torch import Tensor

HALF_MAX = torch.finfo(torch.float16).max


def grouped(x: Tensor, group: tuple[int, int]) -> Tensor:
    """View of `x [..., T, D]` as `[..., T/g_t, g_t, D/g_c, g_c]`."""
    *outer, tokens, channels = x.shape
    return x.view(*outer, tokens // group[0], group[0], channels // group[1], group[1])


def ungrouped(x: Tensor) -> Tensor:
    """Inverse of `grouped`: `[..., N_t, g_t, N_c, g_c]` -> `[..., T, D]`."""
    return x.flatten(-2).flatten(-3, -2)


def extremes(x: Tensor, group: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Half of the least and half of the largest value of each group of `x [..., T, D]`: float32 `[..., T/g_t, D/g_c]`.

    They are halved before they are subtracted or added, so that float32 values near the end of the range do not overflow.
    """
    groups = grouped(x.float(), group)
    return groups.amin((-3, -1)).div_(2), groups.amax((-3, -1)).div_(2)


def measure(x: Tensor, group: tuple[int, int], bits: int, clip: Tensor | float) -> Tensor:
    """Parameters of each group of `x [..., T, D]`: float32 `[..., T/g_t, 2 D/g_c]`, scales first and then zero points.

    `clip` is a number or broadcasts against the scales. A group of equal values gets scale 0 and its value as zero point.
    """
    return between(*extremes(x, group), bits, clip)


def between(low: Tensor, high: Tensor, bits: int, clip: Tensor | float) -> Tensor:
    """`measure` for groups whose `extremes` are given."""
    levels = 2**bits - 1
    scale = (high - low).mul_(clip * (2 / levels))
    return torch.cat([scale, (low + high).sub_(scale, alpha=levels / 2)], -1)


def quantise(x: Tensor, parameters: Tensor, group: tuple[int, int], bits: int) -> Tensor:
    """Codes int16 `[..., T, D]` of `x [..., T, D]` for the **stored** parameters (any float dtype, laid out as by `measure`)."""
    scale, zero = parameters.float()[..., :, None, :, None].chunk(2, -2)
    # Where the scale is 0 any code decodes to the zero point; the clamp avoids a division by 0.
    codes = (grouped(x.float(), group) - zero).div_(scale.clamp_min(torch.finfo(torch.float32).tiny))
    # All numbers are at least 0 here, so that truncation is the floor.
    return ungrouped(codes.add_(0.5).clamp_(0, 2**bits - 1).to(torch.int16))


def dequantise(codes: Tensor, parameters: Tensor, group: tuple[int, int]) -> Tensor:
    """x^ = q s + z, float32 `[..., T, D]`."""
    scale, zero = parameters.float()[..., :, None, :, None].chunk(2, -2)
    return ungrouped(grouped(codes.float(), group) * scale + zero)


def rounded(x: Tensor, parameters: Tensor, group: tuple[int, int], bits: int, out: Tensor) -> Tensor:
    """Writes `dequantise(quantise(x))`, bit by bit the same but without int16 codes, to `out`: `x [..., T, D]` float32."""
    scale, zero = parameters.float()[..., :, None, :, None].chunk(2, -2)
    groups = grouped(out, group)
    torch.sub(grouped(x, group), zero, out=groups).div_(scale.clamp_min(torch.finfo(torch.float32).tiny))
    groups.add_(0.5).clamp_(0, 2**bits - 1).floor_().mul_(scale).add_(zero)
    return out


def stored_parameters(
    y: Tensor, group: tuple[int, int], bits: int, clip: Tensor | float, dtype: torch.dtype, across_heads: bool
) -> Tensor:
    """Measures the parameters of the groups of `y` and rounds them as stored; plain torch."""
    if across_heads:
        y = y.transpose(1, 2).flatten(2)[:, None]
        group = (group[0], y.shape[-1])
    return as_stored(measure(y, group, bits, clip), dtype)


def as_stored(parameters: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds parameters to the stored dtype: float16, clamped to its range, or float32, where numbers within the range of float16
    are rounded to it."""
    if dtype == torch.float32:
        return torch.where(parameters.abs() <= HALF_MAX, parameters.half().float(), parameters)
    return parameters.clamp(-HALF_MAX, HALF_MAX).to(dtype)
