"""Uniform quantisation of values that are divided by their channels' scales: ZipCache's channel-separable tokenwise quantisation of
a chunk with statistics of its own (arXiv:2405.14256, Algorithm 1 and eq. 6).

    c_i = sqrt(max_t |x_ti|)        y_ti = x_ti / c_i        y^_ti = q_ti s_t + z_t, s and z of a token        x^_ti = c_i y^_ti

A channel that is 0 in all of the chunk has c_i = 0 and is decoded as 0. For scales that hold for all chunks of a row there is the
transform `MeasuredScale`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.kernels.attend.products import scaled_mix, scaled_scores
from calib.kernels.channel_ranges.operation import measured
from calib.kernels.magnitude import largest_magnitude
from calib.kernels.quantise.prologue import IDENTITY, Prologue
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Codec, Segment
from calib.runtime.stages.transform.measured import Over


@dataclass(frozen=True, eq=False)
class ScaledChannels(Codec):
    """Codes and parameters of tokens, and the channel scales of their segment in 16 bits.

    Args:
        uniform: quantiser of y, with a range for each token: group (1, None).
        over: c is measured over the "chunk" from which tokens are chosen, or over the chosen ones alone ("tier").

    With D channels, b bits and a segment of n tokens a value takes b + 32/D + 16/n bits.
    """

    uniform: UniformQuant
    over: Over = "chunk"

    has_kernel = True
    fuses_transform = True
    asks_extremes = True
    onnx_writer = "scaled channels"

    def __post_init__(self) -> None:
        if self.uniform.group != (1, None):
            raise ValueError(f"scaled channels need parameters of a token, group (1, None), got {self.uniform.group}")

    @property
    def joins_heads(self) -> bool:
        """Whether all heads of a token share a scale."""
        return self.uniform.joins_heads

    @property
    def over_all_tokens(self) -> bool:
        """True: a segment is encoded as a whole."""
        return True

    def token_group(self) -> int:
        """1: segments may have any length."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """`words` and `parameters` as `UniformQuant` has them, and `scales`: c, float16 (float32 when `fp32_params`)."""
        if segment is None:
            raise ValueError(
                "channel scales are computed over a segment of tokens, and none is given; use MeasuredScale"
            )
        fields = self.uniform.fields(head_dim, dtype, fp32_params, segment)
        return fields | {"scales": Field(None, head_dim, fields["parameters"].dtype, "parameters")}

    def fp32_params(self, x: Tensor) -> bool:
        """Whether a scale or zero point of |x / c|, at most sqrt(max |x|), could be beyond float16."""
        return bool(x.numel()) and self.uniform.fp32_params(largest_magnitude(x).float().sqrt()[None])

    def encode(self, x: Tensor, fp32_params: bool | None = None, prologue: Prologue = IDENTITY) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]`, one segment for each row -> words int16 `[..., n, W]`, parameters `[..., n, 2]`,
        scales `[..., 1, D]`; n is the number of tokens that `prologue` selects, or all."""
        fp32_params = self.fp32_params(x) if fp32_params is None else fp32_params
        order, x = prologue.order, replace(prologue, order=None).forward(x)
        scales = roots(x, fp32_params, None if self.over == "chunk" else order)
        divisors = Prologue(order, half=torch.where(scales > 0, scales, 1))
        return {**self.uniform.encode(x, fp32_params, divisors), "scales": scales}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        scales = block["scales"].float()
        y = self.uniform.decode(block, channels).unflatten(-2, (scales.shape[-2], -1))
        return (y * scales.unsqueeze(-2)).flatten(-3, -2)

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound of `UniformQuant` for x / c, times c; |x| where c rounds to 0."""
        scales = roots(x.float(), self.fp32_params(x)).float()
        bound = self.uniform.error_bound(x.float() / torch.where(scales > 0, scales, 1)) * scales
        return torch.where(scales > 0, bound, x.float().abs())

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """Logits of `query [..., kv_heads, rows, D]` float32 with the keys of one or more segments."""
        scales, (step, zero) = tile["scales"].float(), tile["parameters"].float().chunk(2, -2)
        shift = (query @ scales).repeat_interleave(tile["words"].shape[-1] // scales.shape[-1], -1)
        return scaled_scores(query, tile["words"], scales, self.uniform.bits) * step + shift * zero

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Sums of the values of one or more segments weighted by `weights [..., kv_heads, rows, tokens]` float32."""
        scales, (step, zero) = tile["scales"].float(), tile["parameters"].float().chunk(2, -2)
        shift = (weights * zero).unflatten(-1, (scales.shape[-1], -1)).sum(-1)
        return scaled_mix(weights * step, tile["words"], scales, self.uniform.bits) + shift @ scales.mT

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream | None:
        """The quantiser's stream, with each page's channel scales; None where these are not in pages."""
        stream = self.uniform.packed(pages, channels, shared)
        return None if stream is None or "scales" not in pages else replace(stream, scales=pages["scales"])


def roots(x: Tensor, fp32_params: bool, order: Tensor | None = None) -> Tensor:
    """c of each channel of `x [batch, kv_heads, tokens, head_dim]`, or of those at `order`, as stored: `[..., 1, head_dim]`."""
    return measured("root", x, torch.float32 if fp32_params else torch.float16, order)[0]
