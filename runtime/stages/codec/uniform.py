"""Uniform quantisation with any bit width, group and clip: the codec of KIVI, ZipCache, MiKV, GEAR's backbone and SpeCache.

The arithmetic is in `kernels/quantise` (METHODS 0), the words in `kernels/pack`, attention on codes in `kernels/attend`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.reference import uniform_mix, uniform_scores
from calib.kernels.pack.reference import pack, unpack, words_per_token
from calib.kernels.quantise.reference import dequantise, measure, quantise
from calib.runtime.stages.contract import Block, Field

HALF_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, eq=False)
class UniformQuant:
    """q = clip(round((x - z) / s)), x^ = q s + z, one (s, z) for each group of tokens x channels.

    Args:
        bits: 1 ... 8.
        group: (tokens, channels) that share a scale and a zero point: KIVI's keys (32, 1), its values (1, 32), a token
            (1, None), a channel (None, 1); None is the whole axis. `group=None` measures nothing: the range is
            [-clip, clip], because a calibrated transform has put the tokens there, and no parameter is stored.
        clip: factor on the measured range, 0 < clip <= 1; a float, or float32 `[kv_heads, 1, 1]` from an artifact.

    A value inside the clipped range is decoded to within half a step, plus what 16-bit parameters add (`error_bound`).
    """

    bits: int
    group: tuple[int | None, int | None] | None = (1, None)
    clip: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"bits must be 1 ... 8, got {self.bits}")
        if self.group is not None and any(size is not None and size < 1 for size in self.group):
            raise ValueError(f"group sizes must be positive (or None for the whole axis), got {self.group}")
        if isinstance(self.clip, float | int) and not 0 < self.clip <= 1:
            raise ValueError(f"clip must be in (0, 1], got {self.clip}")

    def token_group(self) -> int:
        """Tokens that share parameters; those of a whole-axis group come in one block of any length, so 1."""
        return (self.group[0] or 1) if self.group else 1

    def fields(self, head_dim: int, dtype: torch.dtype, wide: bool = False) -> dict[str, Field]:
        """`words`, and with a group `scale` and `zero` in float16 (float32 when `wide`)."""
        fields = {"words": Field(1, words_per_token(head_dim, self.bits), torch.int16, "codes")}
        if self.group is not None:
            tokens, channels = self._sizes(self.token_group(), head_dim)
            parameter = Field(tokens, head_dim // channels, torch.float32 if wide else torch.float16, "parameters")
            fields |= {"scale": parameter, "zero": parameter}
        return fields

    def wide(self, x: Tensor) -> bool:
        """Whether a float16 scale or zero point could overflow for values like `x`.

        A scale is at most 2 max|x| / (2^bits - 1) and a zero point at most max|x|, so float16 tokens at 2 bits or more
        answer without looking at the data.
        """
        if self.group is None or (x.dtype == torch.float16 and self.bits > 1):
            return False
        return bool(x.numel() and x.abs().max() * max(1.0, 2 / (2**self.bits - 1)) > HALF_MAX)

    def encode(self, x: Tensor, wide: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]` -> words int16 `[..., W]`, scale and zero `[..., T/g_t, D/g_c]`."""
        if self.group is None:
            scale, zero = self._fixed(x)
            # One group that holds the whole head: the constants broadcast.
            codes = quantise(x, scale, zero, (x.shape[-2], x.shape[-1]), self.bits)
            return {"words": pack(codes, self.bits)}
        group = self._sizes(x.shape[-2], x.shape[-1])
        scale, zero = measure(x, group, self.bits, self.clip)
        if not (self.wide(x) if wide is None else wide):
            # Beyond float16 only if a layer chose 16 bits from its prompt and met larger values later: finite, not exact.
            scale, zero = scale.clamp(max=HALF_MAX).half(), zero.clamp(-HALF_MAX, HALF_MAX).half()
        return {"words": pack(quantise(x, scale, zero, group, self.bits), self.bits), "scale": scale, "zero": zero}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        codes = unpack(block["words"], self.bits, channels)
        if self.group is None:
            scale, zero = self._fixed(codes)
            return codes.float() * scale + zero
        scale, zero = block["scale"], block["zero"]
        group = (codes.shape[-2] // scale.shape[-2], channels // scale.shape[-1])
        return dequantise(codes, scale, zero, group)

    def error_bound(self, x: Tensor) -> Tensor:
        """The largest |x - x^| this codec may show for each value of `x [batch, kv_heads, tokens, head_dim]`, float32.

        What the clip cuts off, half a step, and the rounding of the two stored parameters.
        """
        if self.group is None:
            scale, zero = self._fixed(x)
            return (x.float().abs() + zero).clamp(min=0) + scale / 2 + torch.finfo(torch.float32).eps * zero.abs()
        group = self._sizes(x.shape[-2], x.shape[-1])
        scale, zero = measure(x, group, self.bits, self.clip)
        levels = 2**self.bits - 1
        cut = measure(x, group, self.bits, 1.0)[0] * levels / 2 - scale * levels / 2
        eps, tiny = torch.finfo(torch.float16).eps, torch.finfo(torch.float16).smallest_normal
        rounding = eps * (zero.abs() + scale * (levels + 1)) + tiny * (levels + 2)
        bound = cut + scale / 2 + rounding
        return bound.repeat_interleave(group[0], -2).repeat_interleave(group[1], -1)

    def scores(self, query: Tensor, block: Block) -> Tensor:
        """`query [..., kv_heads, rows, D]` float32 -> logits `[..., kv_heads, rows, tokens]` from the codes."""
        if self.group is not None:
            return uniform_scores(query, block["words"], block["scale"], block["zero"], self.bits)
        scale, zero = self._fixed(query)
        codes = unpack(block["words"], self.bits, query.shape[-1], torch.float32)
        return (query * scale) @ codes.mT + query.sum(-1, keepdim=True) * zero

    def mix(self, weights: Tensor, block: Block, channels: int) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 -> `[..., kv_heads, rows, channels]` from the codes."""
        if self.group is not None:
            return uniform_mix(weights, block["words"], block["scale"], block["zero"], self.bits, channels)
        scale, zero = self._fixed(weights)
        codes = unpack(block["words"], self.bits, channels, torch.float32)
        return (weights @ codes) * scale + weights.sum(-1, keepdim=True) * zero

    def _fixed(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of the calibrated range [-clip, clip], broadcastable over a head's tokens and channels."""
        clip = self.clip if isinstance(self.clip, Tensor) else torch.full((1, 1, 1), self.clip)
        clip = clip.to(like.device, torch.float32)
        return clip * (2 / (2**self.bits - 1)), -clip

    def _sizes(self, tokens: int, channels: int) -> tuple[int, int]:
        """The group in numbers for a block of `tokens` x `channels`; refuses what does not divide."""
        assert self.group is not None
        sizes = (self.group[0] or tokens, self.group[1] or channels)
        for size, whole, axis in zip(sizes, (tokens, channels), ("tokens", "channels"), strict=True):
            if whole % size:
                raise ValueError(f"a group of {size} {axis} does not divide {whole} {axis}; use a divisor of {whole}")
        return sizes
