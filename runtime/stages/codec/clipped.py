"""Entries of large magnitude in a token are clipped before the token is encoded (OSCAR, arXiv:2605.17757, "token-wise clip").

    tau = the value of rank floor(keep D) among |x_1| ... |x_D|, least first, from rank 0        x' = clamp(x, -tau, tau)

A quantiser that measures each token's range then has finer steps for most entries; clipped ones are decoded to the range's end.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.runtime.messages.printable import printable
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.contract import Codec, Segment


@dataclass(frozen=True, eq=False)
class Clipped(Codec):
    """`codec` on tokens that are clipped to a quantile of their own magnitudes; the same fields, bits and kernels.

    Args:
        codec: encodes the clipped tokens.
        keep: in (0, 1], the rank of the magnitude that entries are clipped to, as a share of a head's channels; 1 clips nothing.
    """

    codec: Codec
    keep: float

    def __post_init__(self) -> None:
        if type(self.keep) not in (float, int) or not 0 < self.keep <= 1:
            raise ValueError(f"keep must be a number in (0, 1], got {printable(self.keep)}; 1 cuts nothing")

    def cut(self, x: Tensor) -> Tensor:
        """The clipped x' of `x [..., D]`, in its dtype."""
        rank = math.floor(self.keep * x.shape[-1] + 1e-9)  # 0.29 of 100 is 28.999999999999996
        rank = min(rank, x.shape[-1] - 1)
        tau = x.abs().topk(x.shape[-1] - rank, -1).values[..., -1:]
        return x.clamp(-tau, tau)

    def token_group(self) -> int:
        """As for `codec`."""
        return self.codec.token_group()

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """As for `codec`."""
        return self.codec.fields(head_dim, dtype, fp32_params, segment)

    def fp32_params(self, x: Tensor) -> bool:
        """The codec's answer for the tokens before they are clipped."""
        return self.codec.fp32_params(x)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """Clip `x [batch, kv_heads, tokens, head_dim]` and encode it with the codec."""
        return self.codec.encode(self.cut(x), self.fp32_params(x) if fp32_params is None else fp32_params)

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        return self.codec.decode(block, channels)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """As for `codec`."""
        return self.codec.scores(query, tile)

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """As for `codec`."""
        return self.codec.mix(weights, tile, channels)

    def error_bound(self, x: Tensor) -> Tensor | None:
        """The codec's bound for the clipped tokens, plus what was cut off."""
        left = self.cut(x)
        bound = self.codec.error_bound(left)
        return None if bound is None else bound + (x.float() - left.float()).abs()

    @property
    def asks_extremes(self) -> bool:
        """As for `codec`."""
        return self.codec.asks_extremes

    @property
    def joins_heads(self) -> bool:
        """Whether the codec does."""
        return self.codec.joins_heads

    @property
    def over_all_tokens(self) -> bool:
        """Whether all tokens share the codec's parameters."""
        return self.codec.over_all_tokens

    @property
    def row_by_row(self) -> bool:
        """As for `codec`."""
        return self.codec.row_by_row

    @property
    def piece(self) -> int | None:
        """As for `codec`."""
        return self.codec.piece

    @property
    def has_kernel(self) -> bool:
        """The codec's: pages have the same format."""
        return self.codec.has_kernel

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream | None:
        """As for `codec`."""
        return self.codec.packed(pages, channels, shared)
