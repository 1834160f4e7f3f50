"""The 16-bit tier: tokens as the model made them, in the same pages as every other codec."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import EXACT, PackedStream
from calib.kernels.quantise.prologue import IDENTITY, Prologue
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.contract import Codec, Segment


@dataclass(frozen=True)
class Exact(Codec):
    """Keeps every bit; D(E(x)) = x."""

    exact = True
    has_kernel = True
    fuses_transform = True

    def token_group(self) -> int:
        """1: tokens are encoded independently."""
        return 1

    def encodes_as_they_lie(self, x: Tensor) -> bool:
        """True: nothing but the block is written."""
        return True

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """One field: the token itself in the model's dtype."""
        return {"exact": Field(1, head_dim, dtype, "exact")}

    def fp32_params(self, x: Tensor) -> bool:
        """False: there are no parameters."""
        return False

    def encode(self, x: Tensor, fp32_params: bool | None = None, prologue: Prologue = IDENTITY) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]`, mapped and gathered by `prologue`; x itself if that changes nothing."""
        return {"exact": prologue.gathered(x) if prologue.moves else prologue.forward(x)}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, head_dim]`."""
        return block["exact"].float()

    def error_bound(self, x: Tensor) -> Tensor:
        """0 for each value."""
        return torch.zeros_like(x, dtype=torch.float32)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """q.k in float32."""
        return query @ tile["exact"].float()

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """p.v in float32."""
        return weights @ tile["exact"].float().mT

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream:
        """The tokens themselves."""
        return PackedStream(EXACT, pages["exact"], channels)
