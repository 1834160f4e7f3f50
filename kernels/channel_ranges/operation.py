"""Per-channel statistics of a prompt (ranges, scales), by the implementation for the device."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from calib.kernels.channel_ranges import reference
from calib.kernels.current_device import launching_on
from calib.kernels.dispatch import prefers_triton

Kind = Literal["range", "root", "positive root", "balance"]


def extremes_of(tokens: Tensor) -> Tensor | None:
    """Smallest and largest value of every channel in parts of `tokens [rows, kv_heads, T, D]`: float32 `[rows, kv_heads, parts, 2,
    D]`, an input of `measured`. None if no kernel supports the tokens."""
    if not prefers_triton(tokens.device):
        return None
    from calib.kernels.channel_ranges import triton

    if not tokens.numel() or not triton.supports(tokens, None, None, None):
        return None
    with launching_on(tokens):
        return triton.extremes_of(tokens, tokens.shape[1])


def measured(
    kind: Kind,
    tokens: Tensor,
    dtype: torch.dtype,
    order: Tensor | None = None,
    query: Tensor | None = None,
    into: Sequence[Tensor] | None = None,
    extremes: Tensor | None = None,
) -> list[Tensor]:
    """Measures statistics of every channel of a row and head from the extremes of its tokens.

    Args:
        kind: "range": centre and half range, the latter at least 2^-24. "root": square root of the largest magnitude (ZipCache,
            arXiv:2405.14256, eq. 6). "positive root": the same, but a channel that is 0 throughout gets the smallest positive
            number of its head, or 1 if there is none. "balance": sqrt(max |q| / max |k|), 1 where either is 0 (MiKV,
            arXiv:2402.18096, eq. 2).
        tokens: `[rows, kv_heads, T, D]`, float32, float16 or bfloat16.
        dtype: float16 or float32, the stored dtype; in both, numbers within the range of float16 are rounded to it.
        order: int64 `[rows, kv_heads, n]`, the tokens that are measured; None: all.
        query: `[rows, heads, n, D]`, for "balance" only; the maximum is over all query heads of a KV head.
        into: tensors of the result's shape and dtype, which are written and returned.
        extremes: result of `extremes_of` for all tokens, so that they are not read again.

    Returns:
        A list of one tensor `[rows, kv_heads, 1, D]`, or for "range" of two, with the same bits on every device, except for
        `reference.root` and for the sign of a zero if there are zeros of both signs. NaN if a channel holds a NaN; "positive root"
        and "balance" count NaN as 0.

    Raises IndexError if there are no tokens.
    """
    if prefers_triton(tokens.device):
        from calib.kernels.channel_ranges import triton

        if triton.supports(tokens, order, query, into):
            return triton.measured(kind, tokens, dtype, order, query, into, extremes)
    found = reference.measured(kind, tokens, dtype, order, query)
    if into is None:
        return found
    return [own.copy_(new) for own, new in zip(into, found, strict=True)]
