"""Transforms whose numbers come from a row's own prompt (`statistics="prompt"`) and are frozen after it.

A measured transform is a frozen recipe: `measure` turns a chunk of tokens into the transform of those rows, whose tensors
are `[rows, kv_heads, 1, head_dim]`, and `neutral` is what a row has before it holds a chunk.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from calib.runtime.stages.halves import stored
from calib.runtime.stages.transform.balancer import Balancer
from calib.runtime.stages.transform.channel import NARROW, ChannelRange, ChannelScale

# Over the tokens of one tier, or over all of a chunk before it is split.
Over = Literal["tier", "chunk"]


@dataclass(frozen=True)
class MeasuredRange:
    """The range of every channel (channelwise quantisation, group (T, 1)), as centre and half."""

    over: Over = "tier"

    def measure(self, tokens: Tensor, query: Tensor, dtype: torch.dtype) -> ChannelRange:
        """From `tokens [rows, kv_heads, T, D]`; kept in `dtype`."""
        # Halved before they meet: values near the end of the range must not overflow.
        low, high = (part.float() / 2 for part in torch.aminmax(tokens, dim=2, keepdim=True))
        half = stored(high - low, dtype == torch.float32)
        return ChannelRange(stored(high + low, dtype == torch.float32), half.clamp(min=NARROW))

    def neutral(self, like: Tensor) -> ChannelRange:
        """The range [-1, 1] in the shape of `like`."""
        return ChannelRange(torch.zeros_like(like), torch.ones_like(like))


@dataclass(frozen=True)
class MeasuredScale:
    """c_i = sqrt(max_t |x_ti|), 1 where the channel is all zero (ZipCache, eq. 6)."""

    over: Over = "chunk"

    def measure(self, tokens: Tensor, query: Tensor, dtype: torch.dtype) -> ChannelScale:
        """From `tokens [rows, kv_heads, T, D]`; kept in `dtype`."""
        scale = stored(tokens.abs().amax(2, keepdim=True).float().sqrt(), dtype == torch.float32)
        return ChannelScale(torch.where(scale > 0, scale, torch.ones_like(scale)))

    def neutral(self, like: Tensor) -> ChannelScale:
        """1 in the shape of `like`."""
        return ChannelScale(torch.ones_like(like))


@dataclass(frozen=True)
class MeasuredBalancer:
    """b_i = sqrt(max |q_i| / max |k_i|) over the prompt, 1 where either is 0 (MiKV, arXiv:2402.18096, eq. 2)."""

    over: Over = "chunk"

    def measure(self, tokens: Tensor, query: Tensor, dtype: torch.dtype) -> Balancer:
        """From keys `tokens [rows, kv_heads, T, D]` and `query [rows, heads, n, D]`, whose groups are taken together."""
        keys = tokens.abs().amax(2, keepdim=True).float()
        by_head = query.abs().amax(2, keepdim=True).float()
        queries = by_head.unflatten(1, (tokens.shape[1], -1)).amax(2)
        balance = (queries / keys.clamp_min(torch.finfo(torch.float32).tiny)).sqrt().half().to(dtype)
        usable = (queries > 0) & (keys > 0) & (balance > 0) & balance.isfinite()
        return Balancer(torch.where(usable, balance, torch.ones_like(balance)))

    def neutral(self, like: Tensor) -> Balancer:
        """1 in the shape of `like`."""
        return Balancer(torch.ones_like(like))


Measured = MeasuredRange | MeasuredScale | MeasuredBalancer
