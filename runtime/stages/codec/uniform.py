"""Uniform quantisation with any bit width, group and clip: the codec of KIVI, ZipCache, MiKV, GEAR's backbone and SpeCache.

The arithmetic is in `kernels/quantise`, the packing of codes into words in `kernels/pack`, attention on codes in `kernels/attend`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.kernels.attend.products import code_mix, code_scores, uniform_mix, uniform_scores
from calib.kernels.dispatch import prefers_triton
from calib.kernels.pack.reference import unpack, words_per_token
from calib.kernels.quantise.operation import encode_fixed, encode_pair, encode_uniform, encodes_in_one_pass
from calib.kernels.quantise.prologue import IDENTITY, Prologue
from calib.kernels.quantise.reference import dequantise, measure
from calib.kernels.to_half import HALF_MAX
from calib.runtime.messages.printable import printable
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.contract import Codec, Segment


@dataclass(frozen=True, eq=False)
class UniformQuant(Codec):
    """q = clip(round((x - z) / s)), x^ = q s + z, one (s, z) for each group of tokens x channels.

    Args:
        bits: 1 ... 8.
        group: (tokens, channels) that share a scale and a zero point: KIVI's keys (32, 1), its values (1, 32), a token
            (1, None), a channel (None, 1); None is the whole axis. With `group=None` nothing is measured or stored: the range is
            [-clip, clip], because a calibrated transform maps tokens to [-1, 1].
        clip: factor on the measured range, 0 < clip <= 1; a float, or float32 `[kv_heads, 1, 1]` from an artifact.
        across_heads: the channels of all heads share the parameters; the group's channels are then the whole axis.

    A value inside the clipped range is decoded to within half a step, plus what 16-bit parameters add (`error_bound`).
    """

    bits: int
    group: tuple[int | None, int | None] | None = (1, None)
    clip: float | Tensor = 1.0
    across_heads: bool = False

    has_kernel = True
    fuses_transform = True
    asks_extremes = True
    piece = 2**20
    onnx_writer: ClassVar[str | None] = "uniform"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise ValueError(f"bits must be a whole number 1 ... 8, got {printable(self.bits)}")
        if self.group is not None and not _is_group(self.group):
            raise ValueError(
                "group must be two sizes (tokens, channels), each a positive whole number or None for the whole axis, "
                f"got {printable(self.group)}"
            )
        if not isinstance(self.clip, Tensor) and not (type(self.clip) in (float, int) and 0 < self.clip <= 1):
            raise ValueError(f"clip must be a number in (0, 1], got {printable(self.clip)}")
        if self.across_heads and (self.group is None or self.group[1] is not None):
            raise ValueError(
                f"across_heads needs a group over all channels, (tokens, None), got {printable(self.group)}"
            )

    @property
    def joins_heads(self) -> bool:
        """Whether all heads share parameters."""
        return self.across_heads

    @property
    def over_all_tokens(self) -> bool:
        """Whether all tokens of a block share parameters."""
        return self.group is not None and self.group[0] is None

    def token_group(self) -> int:
        """Number of tokens that share parameters; 1 for a group over all tokens, whose block may have any length."""
        return (self.group[0] or 1) if self.group else 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """`words`, and with a group `parameters`, scales and then zero points, in float16 (float32 when `fp32_params`)."""
        fields = {"words": Field(1, words_per_token(head_dim, self.bits), torch.int16, "codes")}
        if self.group is not None:
            if self.over_all_tokens and segment is None:
                raise ValueError(
                    f"parameters of a group over all tokens cannot be kept in pages, got group {self.group}; "
                    "give a number of tokens"
                )
            _, channels = self._sizes(self.token_group(), head_dim)
            dtype = torch.float32 if fp32_params else torch.float16
            width = 2 * head_dim // channels
            fields["parameters"] = Field(self.group[0], width, dtype, "parameters", shared=self.across_heads)
        return fields

    def fp32_params(self, x: Tensor) -> bool:
        """Whether a float16 scale or zero point could overflow for values like `x`.

        A scale is at most 2 max|x| / (2^bits - 1) and a zero point at most max|x|, so for float16 tokens at 2 bits or more
        the answer is False, and the data is not read.
        """
        if self.group is None or (x.dtype == torch.float16 and self.bits > 1):
            return False
        if not x.numel():
            return False
        # In float32: bfloat16 would round HALF_MAX itself up.
        return bool(torch.stack(x.aminmax()).float().abs().max() * max(1.0, 2 / (2**self.bits - 1)) > HALF_MAX)

    def encode(self, x: Tensor, fp32_params: bool | None = None, prologue: Prologue = IDENTITY) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]`, mapped and gathered by `prologue` -> words int16 `[..., T, W]`, parameters
        `[..., T/g_t, 2 D/g_c]` for groups of g_t tokens x g_c channels."""
        if self.group is None:
            return {"words": encode_fixed(x, self.bits, self.clip, prologue)}
        count = x.shape[-2] if prologue.order is None else prologue.order.shape[-1]
        group, fp32_params = (
            self._sizes(count, x.shape[-1]),
            self.fp32_params(prologue.forward(x)) if fp32_params is None else fp32_params,
        )
        dtype = torch.float32 if fp32_params else torch.float16
        words, parameters = encode_uniform(x, group, self.bits, self.clip, dtype, self.across_heads, prologue)
        return {"words": words, "parameters": parameters}

    def encodes_as_they_lie(self, x: Tensor) -> bool:
        """Whether a kernel measures and quantises groups of this shape in one pass."""
        if self.group is None:
            return encodes_in_one_pass(x, None, self.bits, self.clip)
        if self.across_heads or self.over_all_tokens:
            return False
        return encodes_in_one_pass(x, self._sizes(self.token_group(), x.shape[-1]), self.bits, self.clip)

    def encode_pair(self, other: Codec, pair: tuple[Tensor, Tensor], fp32_params: bool) -> tuple[Block, Block] | None:
        """Both blocks in one call, if both codecs have the same bits and the same groups, each of a single token; else None."""
        if not isinstance(other, UniformQuant) or (self.bits, self.group) != (other.bits, other.group):
            return None
        if self.group is None or self.group[0] != 1 or self.across_heads or other.across_heads:
            return None
        _, channels = self._sizes(1, pair[0].shape[-1])
        dtype = torch.float32 if fp32_params else torch.float16
        keys, values = encode_pair(pair, channels, self.bits, (self.clip, other.clip), dtype)
        return {"words": keys[0], "parameters": keys[1]}, {"words": values[0], "parameters": values[1]}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        codes = unpack(block["words"], self.bits, channels)
        if self.group is None:
            return dequantise(codes, torch.cat(self.fixed(codes), -1), (codes.shape[-2], channels))
        tokens, columns = block["parameters"].shape[-2:]
        return dequantise(codes, block["parameters"], (codes.shape[-2] // tokens, 2 * channels // columns))

    def error_bound(self, x: Tensor) -> Tensor:
        """The largest |x - x^| that is possible for each value of `x [batch, kv_heads, tokens, head_dim]`, float32.

        It is the sum of what the clip cuts off, half a step, and the rounding of the two stored parameters.
        """
        if self.across_heads:
            merged = replace(self, across_heads=False).error_bound(x.transpose(1, 2).flatten(2)[:, None])
            return merged[:, 0].unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
        eps = torch.finfo(torch.float32).eps
        if self.group is None:
            scale, zero = self.fixed(x)
            return (x.float().abs() + zero).clamp(min=0) + scale / 2 + eps * zero.abs()
        group, levels = self._sizes(x.shape[-2], x.shape[-1]), 2**self.bits - 1
        scale, zero = measure(x, group, self.bits, self.clip).chunk(2, -1)
        cut = (measure(x, group, self.bits, 1.0).chunk(2, -1)[0] - scale) * (levels / 2)
        half = torch.finfo(torch.float16)
        rounding = half.eps * (zero.abs() + scale * (levels + 1)) + half.smallest_normal * (levels + 2)
        bound = cut + scale / 2 + rounding
        return bound.repeat_interleave(group[0], -2).repeat_interleave(group[1], -1)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """`query [..., kv_heads, rows, D]` float32 -> logits `[..., kv_heads, rows, tokens]` from the codes."""
        if self.group is not None:
            return uniform_scores(query, tile["words"], tile["parameters"], self.bits)
        scale, zero = self.fixed(query)
        return code_scores(query * scale, tile["words"], self.bits) + query.sum(-1, keepdim=True) * zero

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 -> `[..., kv_heads, rows, channels]` from the codes."""
        if self.group is not None:
            return uniform_mix(weights, tile["words"], tile["parameters"], self.bits, channels)
        scale, zero = self.fixed(weights)
        mixed = code_mix(weights, tile["words"], self.bits, channels)
        return mixed * scale + weights.sum(-1, keepdim=True) * zero

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream | None:
        """The words, with parameters from `pages`, or a row's from `shared`, or fixed ones; None for a row's groups of channels."""
        words = pages["words"]
        if self.group is None:
            return PackedStream(self.bits, words, channels, fixed=self.fixed(words))
        if "parameters" not in pages:
            parameters = shared["parameters"]
            if not prefers_triton(words.device):  # the Triton kernels read float16 parameters
                parameters = parameters.float()
            scale, zero = parameters.chunk(2, -2)
            return PackedStream(self.bits, words, channels, fixed=(scale.mT, zero.mT)) if self.whole(channels) else None
        parameters = pages["parameters"]
        return PackedStream(self.bits, words, channels, parameters, words.shape[2] // max(1, parameters.shape[2]))

    def residual_form(self, head_dim: int) -> str:
        """Its group as the artifact writes it, and its bits: "64x1.2", "1x*.4" (a whole head), "*x1.2"; "fixed.4" where nothing
        is measured."""
        if self.group is None:
            return f"fixed.{self.bits}"
        tokens, channels = self.group
        return f"{tokens or '*'}x{'*' if channels in (None, head_dim) else channels}.{self.bits}"

    def whole(self, channels: int) -> bool:
        """Whether parameters are per channel or one for a whole axis of `channels`, not for groups of them."""
        return self.group is not None and self.group[1] in (None, 1, channels)

    def fixed(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of the calibrated range [-clip, clip], where `group` is None: float32 `[kv_heads or 1, 1, 1]`."""
        # A clip tensor is on the tokens' device already (StreamPlan.to): moving it here would make the host wait in every step.
        return (
            _of_clip(self.clip, self.bits)
            if isinstance(self.clip, Tensor)
            else _of_number(self.clip, self.bits, like.device)
        )

    def _sizes(self, tokens: int, channels: int) -> tuple[int, int]:
        """The group's size in numbers for a block of `tokens` x `channels`; raises ValueError if it does not divide them."""
        assert self.group is not None
        sizes = (self.group[0] or tokens, self.group[1] or channels)
        for size, whole, axis in ((sizes[0], tokens, "tokens"), (sizes[1], channels, "channels")):
            if whole % size:
                raise not_divided(size, whole, axis)
        return sizes


def not_divided(size: int, whole: int, axis: str) -> ValueError:
    """Returns the error of groups of `size` tokens or channels that do not divide `whole` of them."""
    return ValueError(
        f"a group of {size} {axis} does not divide {whole} {axis}; give a divisor of {whole} as the option group (of "
        "corrections: residual_group)"
    )


def _of_clip(clip: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    return clip * (2 / (2**bits - 1)), -clip


@cache
def _of_number(clip: float, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a clip that is a number; cached, because a step needs them in every layer, and without a limit,
    because a captured CUDA graph reads the tensors at their addresses."""
    return _of_clip(torch.full((1, 1, 1), clip, dtype=torch.float32, device=device), bits)


def _is_group(group: Sequence[int | None]) -> bool:
    """Whether it is a pair of positive whole numbers or None."""
    return (
        isinstance(group, tuple | list)
        and len(group) == 2
        and all(size is None or (type(size) is int and size > 0) for size in group)
    )
