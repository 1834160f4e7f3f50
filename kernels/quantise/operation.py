"""Quantises tokens and packs their codes, with measured ranges (`encode_uniform`) or calibrated ones (`encode_fixed`)."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from calib.kernels.current_device import launching_on
from calib.kernels.dispatch import prefers_triton
from calib.kernels.pack.reference import pack_away
from calib.kernels.quantise.prologue import IDENTITY, Prologue
from calib.kernels.quantise.reference import quantise, stored_parameters


def encode_uniform(
    x: Tensor,
    group: tuple[int, int],
    bits: int,
    clip: Tensor | float,
    parameter_dtype: torch.dtype,
    across_heads: bool = False,
    prologue: Prologue = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """Measures the range of every group, rounds its scale and zero point as stored, quantises with these, and packs.

    Args:
        x: `[..., kv_heads, T, D]`, float32, float16 or bfloat16, finite.
        group: (g_t tokens, g_c channels) that share parameters; must divide T and D.
        bits: 1 ... 8.
        clip: clip factor of the range, a number or float32 that broadcasts against the scales, `[kv_heads, 1, 1]`.
        parameter_dtype: float16 (clamped to its range), or float32 (numbers within the range of float16 are rounded to it).
        across_heads: the channels of all heads share parameters; then `group[1]` is D and x has four dimensions.
        prologue: gather and affine map that are applied to x first.

    Returns:
        words int16 `[..., T, W]` and parameters `[..., T/g_t, 2 D/g_c]`, scales before zero points (`[rows, 1, T/g_t, 2]` with
        `across_heads`).

    Raises ValueError if a group does not divide the tokens or the channels.
    """
    total = x.shape[-2] if prologue.order is None else prologue.order.shape[-1]
    if total % group[0] or x.shape[-1] % group[1]:
        raise ValueError(f"a group must divide the tokens and channels, {total} x {x.shape[-1]}, got {group}")
    if prefers_triton(x.device):
        triton = _triton()
        if triton.supports(x, clip, prologue):
            with launching_on(x):
                return triton.encode_uniform(x, group, bits, clip, parameter_dtype, across_heads, prologue)
    y = prologue.forward(x)
    parameters = stored_parameters(y, group, bits, clip, parameter_dtype, across_heads)
    return pack_away(quantise(y, parameters, group, bits), bits), parameters


def encode_pair(
    pair: tuple[Tensor, Tensor], group: int, bits: int, clips: tuple[Tensor | float, Tensor | float], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """`encode_uniform` of two tensors (keys and values) with groups of one token and `group` channels and parameters in `dtype`; in
    one launch if the kernel supports both."""
    if prefers_triton(pair[0].device):
        triton = _triton()
        if triton.supports_pair(pair, group, bits, clips):
            with launching_on(pair[0]):
                return triton.encode_pair(pair, group, bits, clips, dtype)
    return [encode_uniform(x, (1, group), bits, clip, dtype) for x, clip in zip(pair, clips, strict=True)]


def encode_fixed(x: Tensor, bits: int, clip: Tensor | float, prologue: Prologue = IDENTITY) -> Tensor:
    """Quantises with the fixed range [-clip, clip], to which a calibrated transform has scaled the tokens, and packs.

    Args:
        x, bits, prologue: as for `encode_uniform`.
        clip: a number, or float32 `[kv_heads, 1, 1]`.

    Returns:
        words int16 `[..., n, W]`.
    """
    if prefers_triton(x.device):
        triton = _triton()
        if triton.supports(x, clip, prologue):
            with launching_on(x):
                return triton.encode_fixed(x, bits, clip, prologue)
    y = prologue.forward(x)
    bound = clip if isinstance(clip, Tensor) else torch.full((1, 1, 1), clip, dtype=torch.float32, device=x.device)
    fixed = torch.cat([bound * (2 / (2**bits - 1)), -bound], -1)
    # One group for the whole head: the constants broadcast.
    return pack_away(quantise(y, fixed, (y.shape[-2], y.shape[-1]), bits), bits)


def encodes_in_one_pass(x: Tensor, group: tuple[int, int] | None, bits: int, clip: Tensor | float) -> bool:
    """Whether a kernel encodes tokens like `x` in one pass, including the measurement of groups (tokens, channels); `group` None:
    calibrated ranges, nothing is measured."""
    return prefers_triton(x.device) and _triton().in_one_pass(x, group, bits, clip)


@cache
def _triton() -> ModuleType:
    from calib.kernels.quantise import triton

    return triton
