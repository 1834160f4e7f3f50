"""What is measured of a prompt's channels, by whichever form of the operation the device runs."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from calib.kernels.channel_ranges import reference
from calib.kernels.current_device import launching_on
from calib.kernels.dispatch import prefers_triton

Kind = Literal["range", "root", "positive root", "balance"]


def extremes_of(tokens: Tensor) -> Tensor | None:
    """The smallest and the largest of every channel, from which `measured` goes on: float32 `[rows, kv_heads, parts, 2, D]`, of
    parts of `tokens [rows, kv_heads, T, D]`. None where no kernel finds them."""
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
    """Numbers of every channel of a row and head, from the extremes of its tokens.

    Args:
        kind: "range" gives centre and half range, the latter at least 2^-24; "root" the root of the largest magnitude (ZipCache,
            arXiv:2405.14256, eq. 6); "positive root" the same, but for a channel that is 0 throughout its head's least other, and 1
            where all are; "balance" sqrt(max |q| / max |k|), 1 where either is 0 (MiKV, arXiv:2402.18096, eq. 2).
        tokens: `[rows, kv_heads, T, D]`, float32, float16 or bfloat16.
        dtype: float16 or float32, as they are stored; what float16 can hold is rounded to it in both.
        order: int64 `[rows, kv_heads, n]`, the tokens that are measured; None: all.
        query: `[rows, heads, n, D]`, for "balance" alone; the heads of a KV head are taken together.
        into: tensors like the result, which are then written and given back.
        extremes: what `extremes_of` found of all tokens: they are not read again.

    Returns:
        One tensor `[rows, kv_heads, 1, D]`, or two, the same bits on every device, but for `reference.root` and for the sign of
        a zero among zeros of both signs. NaN where a channel holds one; "positive root" and "balance" count it as 0.

    Raises RuntimeError where there are no tokens.
    """
    if prefers_triton(tokens.device):
        from calib.kernels.channel_ranges import triton

        if triton.supports(tokens, order, query, into):
            return triton.measured(kind, tokens, dtype, order, query, into, extremes)
    found = reference.measured(kind, tokens, dtype, order, query)
    if into is None:
        return found
    return [own.copy_(new) for own, new in zip(into, found, strict=True)]
