"""Components divided by their token's size: the counterpart of `runtime/stages/codec/sized.py`."""

from dataclasses import dataclass

import numpy as np
import torch

from calib.export.onnx.graph import Value
from calib.export.onnx.packing import pack, pack_bytes, unpack, unpack_bytes
from calib.export.onnx.shape import Field, Fields, Shape
from calib.export.onnx.trellis import TrellisWords
from calib.export.onnx.words import CPU, WordCodesWriter, Words
from calib.kernels.attend.operation import SIZE_BITS
from calib.runtime.stages.codec import Sized, TrellisQuant
from calib.runtime.stages.codec.sized import size_edges, size_of, size_words
from calib.runtime.stages.exact_sums import WHOLE_BITS

LEAST = 2.0**-126  # lower bound of a token's largest component, from which its unit is computed


@dataclass(frozen=True)
class SizedWords:
    """The words of y / s, and the field `sizes`: the codes of the sizes s of all heads."""

    codec: Sized
    shape: Shape
    fp32_params: bool

    @property
    def words(self) -> WordCodesWriter:
        """The writer of y / s."""
        writer = TrellisWords if isinstance(self.codec.codec, TrellisQuant) else Words
        return writer(self.codec.codec, self.shape, self.fp32_params)

    @property
    def _in_bytes(self) -> bool:
        return self.codec.dtype == torch.uint8

    def fields(self) -> Fields:
        """Returns the words' fields and `sizes`, for every token."""
        dtype = np.uint8 if self._in_bytes else np.int16
        return self.words.fields() | {"sizes": Field(dtype, 1, 1, size_words(self.shape.heads))}

    def encode(self, y: Value) -> dict[str, Value]:
        """Returns the fields of y, float32 `[batch, kv_heads, tokens, components]`."""
        number = (_norm(y * self.codec.weights.numpy()) > size_edges(CPU).numpy()).cast(np.int32).sum(3)
        pack_away = pack_bytes if self._in_bytes else pack
        packed = pack_away(number.permute(0, 3, 2, 1), SIZE_BITS, self.shape.heads)
        return self.words.encode(y / _size(number)) | {"sizes": packed}

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns y^, float32 `[batch, kv_heads, tokens, components]`."""
        return self.words.decode(block) * self.sizes(block)

    def sizes(self, block: dict[str, Value]) -> Value:
        """Returns the sizes s, float32 `[batch, kv_heads, tokens, 1]`."""
        unpacked = unpack_bytes if self._in_bytes else unpack
        return _size(unpacked(block["sizes"], SIZE_BITS, self.shape.heads).permute(0, 3, 2, 1))

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns q.y^ `[batch, kv_heads, rows, tokens]`; the scores are multiplied by the sizes."""
        return self.words.scores(query, block) * self.sizes(block).permute(0, 1, 3, 2)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns sum_t p_t y^_t `[batch, kv_heads, rows, components]`; the weights are multiplied by the sizes."""
        return self.words.mix(weights * self.sizes(block).permute(0, 1, 3, 2), block)


def _norm(x: Value) -> Value:
    """Returns |x| as the runtime computes it, exact to 22 bits: sums of integers in a unit per token, float32 `[..., tokens,
    1]`."""
    graph, largest = x.graph, x.abs().max(3).cast(np.float64).at_least(LEAST)
    # The largest power of two that is not above; corrected by one, as the logarithm may be rounded up or down.
    power = graph.constant(2.0, np.float64).op("Pow", (largest.op("Log") / np.log(2.0)).op("Floor"))
    power = graph.where(power > largest, power / 2.0, power)
    power = graph.where(power * 2.0 <= largest, power * 2.0, power)
    unit = power / 2.0 ** (WHOLE_BITS - 1)
    whole = (x.cast(np.float64) / unit).op("Round")
    return ((whole * whole).sum(3).op("Sqrt") * unit).cast(np.float32)


def _size(number: Value) -> Value:
    """Returns the size s of its code `number`, float32."""
    sizes = size_of(torch.arange(1 << SIZE_BITS)).numpy()
    return number.graph.constant(sizes).take(number)
