"""Codes for a token's values relative to its range, by one table of levels (KVQuant, arXiv:2401.18079, sections 3.1 and 3.3).

    z = (max x + min x) / 2        s = (max x - min x) / 2        i_j = argmin_k |(x_j - z) / s - c_k|        x^_j = z + s c_(i_j)

max and min are over the channels of all KV heads of a token: two numbers a token for the whole layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.to_half import HALF_MAX, stored
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.codec.codebook import Codebook
from calib.runtime.stages.contract import Codec, Segment


@dataclass(frozen=True, eq=False)
class TokenRange(Codec):
    """Centre and half range of a token in 16 bits each, shared by the KV heads; its values on [-1, 1] by `codebook`.

    Args:
        codebook: levels on [-1, 1].

    A token with heads of D channels takes b D bits a head for b-bit codes, rounded up to 16-bit words, and 32 bits for its range.
    """

    codebook: Codebook

    asks_extremes = True

    @property
    def joins_heads(self) -> bool:
        """The heads of a token share its range."""
        return True

    def token_group(self) -> int:
        """1: tokens are encoded independently."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The packed indices, and a token's centre and half range in float16 (float32 when `fp32_params`)."""
        parameters = Field(1, 2, torch.float32 if fp32_params else torch.float16, "parameters", shared=True)
        return self.codebook.fields(head_dim, dtype, fp32_params, segment) | {"parameters": parameters}

    def fp32_params(self, x: Tensor) -> bool:
        """Whether a centre or half range of tokens like `x` could be beyond float16."""
        if x.dtype == torch.float16 or not x.numel():
            return False
        # In float32: bfloat16 would round HALF_MAX itself up.
        return bool(torch.stack(x.aminmax()).float().abs().max() > HALF_MAX)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]` -> words int16 `[..., tokens, W]`, parameters `[batch, 1, tokens, 2]`."""
        parameters = self.parameters(x, self.fp32_params(x) if fp32_params is None else fp32_params)
        return {**self.codebook.encode(normalised(x, parameters)), "parameters": parameters}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        centre, half = block["parameters"].float().chunk(2, -1)
        return self.codebook.decode({"words": block["words"]}, channels) * half + centre

    def error_bound(self, x: Tensor) -> Tensor:
        """The codebook's bound times the half range; |x - centre| where the half range rounds to 0."""
        parameters = self.parameters(x, self.fp32_params(x)).float()
        centre, half = parameters.chunk(2, -1)
        bound = self.codebook.error_bound(normalised(x, parameters)) * half
        # The rounding of two products and a sum in float32.
        bound = bound + 4 * torch.finfo(torch.float32).eps * (half + centre.abs())
        return torch.where(half == 0, (x.float() - centre).abs(), bound)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """Logits of `query [..., kv_heads, rows, D]` float32 with a tile of keys, from codes, half ranges and centres."""
        centre, half = tile["parameters"].float().chunk(2, -2)
        return self.codebook.scores(query, {"words": tile["words"]}) * half + query.sum(-1, keepdim=True) * centre

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Sums of a tile of values by `weights [..., kv_heads, rows, tokens]` float32, from codes, half ranges and centres."""
        centre, half = tile["parameters"].float().chunk(2, -2)
        mixed = self.codebook.mix(weights * half, {"words": tile["words"]}, channels)
        return mixed + (weights * centre).sum(-1, keepdim=True)

    @staticmethod
    def parameters(x: Tensor, fp32_params: bool) -> Tensor:
        """Centre and half range as they are stored, `[batch, 1, tokens, 2]`."""
        x = x.float()
        low, high = x.amin((1, 3), keepdim=True), x.amax((1, 3), keepdim=True)
        return stored(torch.cat([low + (high - low) / 2, (high - low) / 2], -1), fp32_params)


def normalised(x: Tensor, parameters: Tensor) -> Tensor:
    """(x - z) / s, float32 like `x [batch, kv_heads, tokens, head_dim]`; a token whose half range is 0 is divided by 1."""
    centre, half = parameters.float().chunk(2, -1)
    return (x.float() - centre) / torch.where(half == 0, 1, half)
