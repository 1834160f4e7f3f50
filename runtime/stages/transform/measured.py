"""Transforms whose parameters are measured on a row's own prompt (`statistics="prompt"`) and then stay fixed.

A measured transform is a recipe: `measure` makes the transform of some rows from a chunk of their tokens, with tensors
`[rows, kv_heads, 1, head_dim]`, and `neutral` makes the one that a row has before its first chunk.
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
    """A recipe for a transform: `measure` fits it to a row's first chunk, and it stays fixed from then on."""

    @property
    def kind(self) -> Kind:
        """The statistic (`kernels/channel_ranges`)."""
        ...

    @property
    def transform(self) -> type[Transform]:
        """The class of the transform, made of the statistic's tensors."""
        ...

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
        """Measures `tokens [rows, kv_heads, T, D]`, or those at `order [rows, kv_heads, n]`, and `query [rows, heads, n, D]`;
        returns the transform. Its parameters `[rows, kv_heads, 1, D]` are rounded to `dtype`, and written to `into` if it is given.
        `extremes`: those of all tokens, if they are known already (`kernels/channel_ranges`)."""
        queries = query if self.needs_queries else None
        return self.transform(*measured(self.kind, tokens, dtype, order, queries, into, extremes))

    def neutral(self, like: Tensor) -> Transform:
        """The transform of a row before its first chunk, with parameters shaped like `like`."""
        ...

    @property
    def measured(self) -> "Measured | None":
        """The recipe itself."""
        return self

    @property
    def components(self) -> None:
        """None: a measured transform keeps the channels."""
        return None

    @property
    def growth(self) -> float:
        """1: a measured transform mixes no channels."""
        return 1.0

    @property
    def needs_queries(self) -> bool:
        """Whether `measure` uses the queries."""
        return False

    @property
    def onnx_writer(self) -> str | None:
        """The name in `calib/export/onnx/transform.py` of what measures it in a graph; None: nothing does."""
        return None


@dataclass(frozen=True)
class MeasuredRange(Measured):
    """The range of every channel (channelwise quantisation, group (T, 1)), as centre and half."""

    over: Over = "tier"
    kind = "range"
    transform = ChannelRange
    onnx_writer = "range"

    def neutral(self, like: Tensor) -> ChannelRange:
        """The range [-1, 1] in the shape of `like`."""
        return ChannelRange(torch.zeros_like(like), torch.ones_like(like))


@dataclass(frozen=True)
class MeasuredScale(Measured):
    """c_i = sqrt(max_t |x_ti|) (ZipCache, arXiv:2405.14256, eq. 6). A channel that is 0 throughout has c_i = 0 and is decoded to 0.

    `frozen`: later tokens are divided by c as well. Then a channel that was 0 has the least c of its head's other channels, so
    that zeros are decoded to nearly 0 and later values other than 0 are not lost; 1 where all channels were 0.
    """

    over: Over = "chunk"
    frozen: bool = False
    transform = ChannelScale

    @property
    def kind(self) -> Kind:
        """Frozen scales are never 0."""
        return "positive root" if self.frozen else "root"

    @property
    def onnx_writer(self) -> str:
        """The writer of scales; frozen ones have their own."""
        return "frozen scale" if self.frozen else "scale"

    def neutral(self, like: Tensor) -> ChannelScale:
        """1 in the shape of `like`."""
        return ChannelScale(torch.ones_like(like))


@dataclass(frozen=True)
class MeasuredBalancer(Measured):
    """b_i = sqrt(max |q_i| / max |k_i|) over the prompt, 1 where either is 0 (MiKV, arXiv:2402.18096, eq. 2)."""

    over: Over = "chunk"
    kind = "balance"
    transform = Balancer
    needs_queries = True
    onnx_writer = "balancer"

    def neutral(self, like: Tensor) -> Balancer:
        """1 in the shape of `like`."""
        return Balancer(torch.ones_like(like))
