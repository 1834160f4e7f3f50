"""Transforms whose numbers come from a row's own prompt (`statistics="prompt"`) and are frozen after it.

A measured transform is a frozen recipe: `measure` turns a chunk of tokens into the transform of those rows, whose tensors
are `[rows, kv_heads, 1, head_dim]`, and `neutral` is what a row has before it holds a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from calib.kernels.channel_ranges.operation import Kind, measured
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.transform.balancer import Balancer
from calib.runtime.stages.transform.channel import ChannelRange, ChannelScale

# Over the tokens of one tier, or over all of a chunk before it is split.
Over = Literal["tier", "chunk"]


class Measured(Protocol):
    """A recipe for a transform: `measure` fits it to a row's first chunk, and it is frozen from then on."""

    @property
    def over(self) -> Over:
        """What it is measured over: the tokens of one tier, or all of a chunk before it is split."""
        ...

    def measure(
        self,
        tokens: Tensor,
        query: Tensor,
        dtype: torch.dtype,
        order: Tensor | None = None,
        into: Sequence[Tensor] | None = None,
        extremes: Tensor | None = None,
    ) -> Transform:
        """`tokens [rows, kv_heads, T, D]`, or those of them at `order [rows, kv_heads, n]`, and `query [rows, heads, n, D]` -> a
        transform whose numbers, `[rows, kv_heads, 1, D]`, are kept in `dtype`; written to `into`, where it is given. `extremes`: of
        all tokens, where they are known (`kernels/channel_ranges`)."""
        ...

    def neutral(self, like: Tensor) -> Transform:
        """What a row has before it holds a chunk, in the shape of `like`."""
        ...

    @property
    def measured(self) -> "Measured | None":
        """The recipe itself."""
        return self

    @property
    def components(self) -> None:
        """A recipe's transform keeps the channels."""
        return None

    @property
    def needs_queries(self) -> bool:
        """Whether the queries decide, too."""
        return False

    @property
    def onnx_writer(self) -> str | None:
        """The name in `calib/export/onnx/transform.py` of what measures it in a graph; None: nothing does."""
        return None


@dataclass(frozen=True)
class MeasuredRange(Measured):
    """The range of every channel (channelwise quantisation, group (T, 1)), as centre and half."""

    over: Over = "tier"
    onnx_writer = "range"

    def measure(
        self,
        tokens: Tensor,
        query: Tensor,
        dtype: torch.dtype,
        order: Tensor | None = None,
        into: Sequence[Tensor] | None = None,
        extremes: Tensor | None = None,
    ) -> ChannelRange:
        """From `tokens [rows, kv_heads, T, D]`; kept in `dtype`."""
        return ChannelRange(*measured("range", tokens, dtype, order, into=into, extremes=extremes))

    def neutral(self, like: Tensor) -> ChannelRange:
        """The range [-1, 1] in the shape of `like`."""
        return ChannelRange(torch.zeros_like(like), torch.ones_like(like))


@dataclass(frozen=True)
class MeasuredScale(Measured):
    """c_i = sqrt(max_t |x_ti|) (ZipCache, arXiv:2405.14256, eq. 6). A channel that is 0 throughout has c_i = 0 and comes back as 0.

    `frozen`: later tokens are divided by c as well. A channel that was 0 then has the least c of its head's others, so that it
    comes back nearly 0 and is not lost when it moves; 1 where all were 0.
    """

    over: Over = "chunk"
    frozen: bool = False

    @property
    def onnx_writer(self) -> str:
        """Frozen scales are never 0."""
        return "frozen scale" if self.frozen else "scale"

    def measure(
        self,
        tokens: Tensor,
        query: Tensor,
        dtype: torch.dtype,
        order: Tensor | None = None,
        into: Sequence[Tensor] | None = None,
        extremes: Tensor | None = None,
    ) -> ChannelScale:
        """From `tokens [rows, kv_heads, T, D]`; kept in `dtype`."""
        kind: Kind = "positive root" if self.frozen else "root"
        return ChannelScale(*measured(kind, tokens, dtype, order, into=into, extremes=extremes))

    def neutral(self, like: Tensor) -> ChannelScale:
        """1 in the shape of `like`."""
        return ChannelScale(torch.ones_like(like))


@dataclass(frozen=True)
class MeasuredBalancer(Measured):
    """b_i = sqrt(max |q_i| / max |k_i|) over the prompt, 1 where either is 0 (MiKV, arXiv:2402.18096, eq. 2)."""

    over: Over = "chunk"
    needs_queries = True
    onnx_writer = "balancer"

    def measure(
        self,
        tokens: Tensor,
        query: Tensor,
        dtype: torch.dtype,
        order: Tensor | None = None,
        into: Sequence[Tensor] | None = None,
        extremes: Tensor | None = None,
    ) -> Balancer:
        """From keys `tokens [rows, kv_heads, T, D]` and `query [rows, heads, n, D]`, whose groups are taken together."""
        return Balancer(*measured("balance", tokens, dtype, order, query, into, extremes))

    def neutral(self, like: Tensor) -> Balancer:
        """1 in the shape of `like`."""
        return Balancer(torch.ones_like(like))
