"""Values divided by channel scales of their segment: the counterpart of `runtime/stages/codec/scaled_channels.py`."""

from dataclasses import dataclass

from calib.export.onnx.graph import Value
from calib.export.onnx.halves import kept_dtype
from calib.export.onnx.shape import Field, Fields, Shape
from calib.export.onnx.transform import over, root_of_largest
from calib.export.onnx.uniform import Uniform
from calib.runtime.stages.codec import ScaledChannels


@dataclass(frozen=True)
class Scaled:
    """The fields of the quantised y = x / c, and `scales`, the scale c of each channel."""

    codec: ScaledChannels
    shape: Shape
    fp32_params: bool

    @property
    def uniform(self) -> Uniform:
        """The writer of y."""
        return Uniform(self.codec.uniform, self.shape, self.fp32_params)

    @property
    def scales_field(self) -> Field:
        """The field of c: one number for each channel of a segment."""
        return Field(kept_dtype(self.fp32_params), self.shape.heads, None, self.shape.channels)

    def fields(self) -> Fields:
        """Returns the quantiser's fields, and `scales`."""
        return self.uniform.fields() | {"scales": self.scales_field}

    def encode(self, x: Value, scales: Value | None = None) -> dict[str, Value]:
        """Returns the fields of x, float32 `[batch, kv_heads, T, D]`, one segment per row.

        `scales [batch, kv_heads, 1, D]` are given if they were measured over other tokens too; None: measured on x.
        """
        scales = root_of_largest(x, self.fp32_params) if scales is None else scales
        return self.uniform.encode(over(x, scales.cast("float32"))) | {"scales": scales}

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns x^, float32 `[batch, kv_heads, T, D]`."""
        return self.uniform.decode(block) * block["scales"].cast("float32")

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns q.x^ `[batch, kv_heads, rows, T]`."""
        return self.uniform.scores(query * block["scales"].cast("float32"), block)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns sum_t p_t x^_t `[batch, kv_heads, rows, D]`."""
        return self.uniform.mix(weights, block) * block["scales"].cast("float32")
