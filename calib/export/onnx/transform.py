"""Transforms of single channels: the counterpart of `runtime/stages/transform`. Their parameters are constants of the artifact, or
measured once on a row's first tokens (`measure`) and given to all later graphs as inputs."""

from dataclasses import dataclass

import numpy as np

from calib.export.onnx.graph import Graph, Value
from calib.export.onnx.halves import kept_dtype, stored
from calib.export.onnx.shape import Field, Fields, Shape
from calib.kernels.to_half import HALF_MAX, NARROW
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.transform import Measured

# Names of the measured parameters, by `Measured.onnx_writer`.
MEASURED: dict[str, tuple[str, ...]] = {
    "range": ("center", "half"),
    "scale": ("half",),
    "frozen scale": ("half",),
    "balancer": ("balance",),
}


@dataclass(frozen=True)
class ChannelMap:
    """y = (x - center) / half * balance, without the parts that are None; each is float32 `[batch or none, kv_heads, 1, D]`."""

    center: Value | None = None
    half: Value | None = None
    balance: Value | None = None

    @staticmethod
    def constant(graph: Graph, transform: Transform) -> "ChannelMap":
        """Returns the map of a transform with parameters from the artifact."""
        prologue = transform.prologue()
        parts = {"center": prologue.center, "half": prologue.divisor, "balance": prologue.balance}
        return ChannelMap(
            **{name: graph.constant(part.float().numpy()) for name, part in parts.items() if part is not None}
        )

    def forward(self, x: Value) -> Value:
        """Returns y, the transformed tokens, float32."""
        y = x if self.center is None else x - self.center
        y = y if self.half is None else over(y, self.half)
        return y if self.balance is None else y * self.balance

    def inverse(self, y: Value) -> Value:
        """Undoes `forward`."""
        x = y if self.balance is None else y / self.balance
        x = x if self.half is None else x * self.half
        return x if self.center is None else x + self.center

    def fold_query(self, query: Value) -> tuple[Value, Value | None]:
        """Returns (q', constant) with q.x = q'.y + constant."""
        folded = query if self.half is None else query * self.half
        folded = folded if self.balance is None else folded / self.balance
        return folded, None if self.center is None else (query * self.center).sum(3)

    def fold_output(self, mixed: Value, weights: Value) -> Value:
        """Returns sum_t p_t x_t from sum_t p_t y_t and the weights p."""
        found = mixed if self.balance is None else mixed / self.balance
        found = found if self.half is None else found * self.half
        return found if self.center is None else found + self.center * weights.sum(3)


def numbers(measured: Measured, shape: Shape, fp32_params: bool) -> Fields:
    """Returns the fields of the parameters that `measure` returns, each `[batch, kv_heads, 1, D]`."""
    return dict.fromkeys(MEASURED[_name(measured)], Field(kept_dtype(fp32_params), shape.heads, None, shape.channels))


def measure(
    measured: Measured, tokens: Value, query: Value | None, shape: Shape, fp32_params: bool
) -> dict[str, Value]:
    """Returns the parameters measured on a row's first tokens, float32 `[batch, kv_heads, T, D]`.

    The balancer also needs `query [batch, heads, n, D]`.
    """
    where = tokens.graph.where
    if _name(measured) == "range":
        # Halved before the difference, so that values near the end of float32's range do not overflow.
        low, high = tokens.min(2) / 2.0, tokens.max(2) / 2.0
        half = stored(high - low, fp32_params).cast(np.float32).at_least(NARROW).cast(kept_dtype(fp32_params))
        return {"center": stored(high + low, fp32_params), "half": half}
    largest = tokens.abs().max(2)
    if _name(measured) == "scale":
        return {"half": root_of_largest(tokens, fp32_params)}
    if _name(measured) == "frozen scale":
        scale = root_of_largest(tokens, fp32_params).cast(np.float32)
        least = where(scale > 0.0, scale, float("inf")).min(3)
        instead = where(least <= float(np.finfo(np.float32).max), least, 1.0)
        return {"half": where(scale > 0.0, scale, instead).cast(kept_dtype(fp32_params))}
    assert query is not None
    queries = query.abs().max(2).reshape(0, shape.heads, -1, shape.channels).max(2)
    balance = (
        (queries / largest.at_least(float(np.finfo(np.float32).tiny))).op("Sqrt").cast(np.float16).cast(np.float32)
    )
    usable = (queries > 0.0) & (largest > 0.0) & (balance > 0.0) & (balance <= HALF_MAX)
    return {"balance": where(usable, balance, 1.0).cast(kept_dtype(fp32_params))}


def root_of_largest(tokens: Value, fp32_params: bool) -> Value:
    """Returns sqrt(max_t |x_ti|) of each channel i as it is stored, `[batch, kv_heads, 1, D]`."""
    return stored(tokens.abs().max(2).op("Sqrt"), fp32_params)


def over(x: Value, scale: Value) -> Value:
    """Returns x / scale; x itself in channels whose scale is 0."""
    return x / x.graph.where(scale > 0.0, scale, 1.0)


def _name(measured: Measured) -> str:
    """Returns the name of a measured transform's writer; raises ValueError if it has none."""
    if measured.onnx_writer is None:
        raise ValueError(f"{type(measured).__name__} has no graph yet; those that have one: {', '.join(MEASURED)}")
    return measured.onnx_writer
