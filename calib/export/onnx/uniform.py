"""The uniform quantiser: the counterpart of `kernels/quantise` and `runtime/stages/codec/uniform.py`."""

from dataclasses import dataclass

import numpy as np
import torch

from calib.export.onnx.graph import Value
from calib.export.onnx.halves import kept_dtype, stored
from calib.export.onnx.packing import pack, unpack
from calib.export.onnx.shape import Field, Fields, Shape
from calib.kernels.pack.reference import words_per_token
from calib.runtime.stages.codec import UniformQuant

TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Uniform:
    """The fields `words` and, if ranges are measured, `parameters`: stored scale and zero point of each group."""

    codec: UniformQuant
    shape: Shape
    fp32_params: bool

    def fields(self) -> Fields:
        """Returns the fields: `words` for every token, `parameters` for every group of tokens, scales before zero points."""
        heads, channels = self.shape
        fields = {"words": Field(np.int16, heads, 1, words_per_token(channels, self.codec.bits))}
        if self.codec.group is not None:
            fields["parameters"] = Field(
                kept_dtype(self.fp32_params), self._rows, self.codec.group[0], 2 * self._columns
            )
        return fields

    def encode(self, x: Value) -> dict[str, Value]:
        """Returns the fields of x, float32 `[batch, kv_heads, tokens, D]`."""
        if self.codec.group is None:
            return {"words": self._words(x, *self._fixed(x))}
        parameters = self._measured(x)
        scale, zero = self._spread(parameters)
        return {"words": self._words(self._grouped(x), scale, zero), "parameters": parameters}

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns x^, float32 `[batch, kv_heads, tokens, D]`."""
        codes = unpack(block["words"], self.codec.bits, self.shape.channels).cast(np.float32)
        if self.codec.group is None:
            scale, zero = self._fixed(codes)
            return codes * scale + zero
        scale, zero = self._spread(block["parameters"])
        return self._ungrouped(self._grouped(codes) * scale + zero)

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns q.x^ `[batch, kv_heads, rows, tokens]`.

        Scales multiply the codes, or the query if all tokens share them; zero points add a number per query row and group.
        """
        codes, scale, zero = self._codes(block)
        if self._folds:
            return query * scale @ codes.permute(0, 1, 3, 2) + (query * zero).sum(3)
        zeros = query @ zero.permute(0, 1, 3, 2)  # [batch, kv_heads, rows, groups of tokens]
        return query @ codes.permute(0, 1, 3, 2) + self._each_token(zeros, codes)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns sum_t p_t x^_t `[batch, kv_heads, rows, D]`."""
        codes, scale, zero = self._codes(block)
        if self._folds:
            return weights @ codes * scale + weights.sum(3) * zero
        by_group = weights.reshape(0, self.shape.heads, 0, -1, self._tokens[1]).sum(4, keep=False)
        return weights @ codes + by_group @ zero

    @property
    def _folds(self) -> bool:
        """Whether all tokens of a segment share their scales."""
        return self.codec.group is None or self.codec.group[0] is None

    def _codes(self, block: dict[str, Value]) -> tuple[Value, Value, Value]:
        """Returns codes in float32, scales and zero points.

        If scales differ between tokens, the codes are multiplied by them. Scales and zero points are given for each group of
        tokens and each channel, `[..., groups or 1, D]`.
        """
        channels = self.shape.channels
        codes = unpack(block["words"], self.codec.bits, channels).cast(np.float32)
        if self.codec.group is None:
            scale, zero = self._fixed(codes)
            return (
                codes,
                scale,
                zero * np.ones((1, 1, channels), np.float32),
            )  # a head's number, for each of its channels
        scale, zero = self._spread(block["parameters"])
        if not self._folds:
            codes = self._ungrouped(self._grouped(codes) * scale)
        ones = np.ones((1, self._channels), np.float32)
        scale, zero = ((part * ones).reshape(0, self._rows, -1, channels) for part in (scale, zero))
        return codes, scale, zero

    def _each_token(self, zeros: Value, codes: Value) -> Value:
        """Returns `zeros [..., rows, groups of tokens]` repeated for every token of each group."""
        ones = np.ones((1, self._tokens[1]), np.float32)
        return (zeros.reshape(0, 0, 0, -1, 1) * ones).reshape(0, 0, 0, codes.size(2))

    def _words(self, values: Value, scale: Value, zero: Value) -> Value:
        """Returns the packed codes of values with stored parameters. The lower bound of the scale avoids a division by 0."""
        codes = ((values - zero) / scale.at_least(TINY) + 0.5).clamp(0.0, 2.0**self.codec.bits - 1)
        return pack(self._ungrouped(codes.cast(np.int32)), self.codec.bits, self.shape.channels)

    def _measured(self, x: Value) -> Value:
        """Returns the stored parameters of each group: scales, then zero points."""
        levels, groups = 2**self.codec.bits - 1, self._grouped(x)
        if self.codec.across_heads:
            groups = self.shape.merged(x).reshape(0, 1, *self._tokens, 1, self.shape.width)
        low, high = groups.min(3, 5) / 2.0, groups.max(3, 5) / 2.0
        scale = (high - low) * self._factor(levels)
        # The runtime computes product and sum with one rounding; the product in float64 is exact.
        exact = (low + high).cast(np.float64) - scale.cast(np.float64) * (levels / 2)
        both = x.graph.join([scale, exact.cast(np.float32)], 4)
        return stored(both.reshape(0, self._rows, -1, 2 * self._columns), self.fp32_params)

    def _factor(self, levels: int) -> np.ndarray:
        """Returns the factor from half a range to a scale, float32: one number, or one per head, broadcastable to the groups."""
        if isinstance(self.codec.clip, torch.Tensor):
            return (self.codec.clip * (2 / levels)).reshape(1, -1, 1, 1, 1, 1).numpy()
        return np.array(self.codec.clip * (2 / levels), np.float32)

    def _fixed(self, like: Value) -> tuple[Value, Value]:
        """Returns scale and zero point of the calibrated range, `[kv_heads or 1, 1, 1]`."""
        scale, zero = (like.graph.constant(part.numpy()) for part in self.codec.fixed(torch.zeros(1)))
        return scale, zero

    @property
    def _rows(self) -> int:
        """Number of heads with their own parameters; 1 if all heads share them."""
        return 1 if self.codec.across_heads else self.shape.heads

    @property
    def _tokens(self) -> tuple[int, int]:
        """Number of groups of tokens and tokens of a group, as arguments of a reshape (-1: inferred)."""
        assert self.codec.group is not None
        return (1, -1) if self.codec.group[0] is None else (-1, self.codec.group[0])

    @property
    def _channels(self) -> int:
        """Channels of a group within a head."""
        assert self.codec.group is not None
        return self.codec.group[1] or self.shape.channels

    @property
    def _columns(self) -> int:
        """Number of groups of channels in a head."""
        return self.shape.channels // self._channels

    def _grouped(self, x: Value) -> Value:
        """Returns `[batch, kv_heads, T, D]` as `[batch, kv_heads, T / g_t, g_t, D / g_c, g_c]`, for groups of g_t x g_c."""
        return x.reshape(0, self.shape.heads, *self._tokens, self._columns, self._channels)

    def _ungrouped(self, x: Value) -> Value:
        """Undoes `_grouped`; with calibrated ranges nothing was grouped."""
        return x if self.codec.group is None else x.reshape(0, self.shape.heads, -1, self.shape.channels)

    def _spread(self, parameters: Value) -> tuple[Value, Value]:
        """Returns stored scales and zero points in float32, broadcastable to the groups."""
        both = parameters.cast(np.float32).reshape(0, self._rows, -1, 1, 2 * self._columns, 1)
        scale, zero = both.split(4, [self._columns] * 2)
        return scale, zero
