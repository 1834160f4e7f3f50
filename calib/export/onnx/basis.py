"""Calibrated components of a head: the counterpart of `runtime/stages/transform/basis.py`."""

from dataclasses import dataclass

import numpy as np

from calib.export.onnx.graph import Graph, Value
from calib.runtime.stages.transform import Basis
from calib.runtime.stages.transform.basis import TOKEN_BITS


@dataclass(frozen=True)
class Components:
    """y = E (x - mean) and x^ = mean + M y^, float32; E is applied to integers in exact sums, so that codes equal the runtime's."""

    graph: Graph
    basis: Basis

    def forward(self, x: Value) -> Value:
        """Returns y `[batch, kv_heads, tokens, components]` of x `[batch, kv_heads, tokens, D]`."""
        basis, most = self.basis, 2.0**TOKEN_BITS
        whole = ((x - basis.mean.numpy()) * (1 / basis.unit).numpy()).op("Round").clamp(-most, most)
        summed = whole.cast(np.float64) @ self.graph.constant(basis.into.numpy()).cast(np.float64)
        return summed.cast(np.float32) * basis.scale.numpy()

    def inverse(self, y: Value) -> Value:
        """Returns x^ `[batch, kv_heads, tokens, D]` of the coded components y^."""
        return y * self.basis.gain.numpy() @ self._back() + self.basis.mean.numpy()

    def fold_query(self, query: Value) -> tuple[Value, Value | None]:
        """Returns (q', constant) with q.x^ = q'.y^ + constant."""
        folded = query @ self._back().permute(0, 2, 1) * self.basis.gain.numpy()
        return folded, (query * self.basis.mean.numpy()).sum(3)

    def fold_output(self, mixed: Value, weights: Value) -> Value:
        """Returns sum_t p_t x^_t from sum_t p_t y^_t and the weights p."""
        return mixed * self.basis.gain.numpy() @ self._back() + weights.sum(3) * self.basis.mean.numpy()

    def _back(self) -> Value:
        """M^T, float32 `[kv_heads, components, D]`."""
        return self.graph.constant(self.basis.back.numpy()).cast(np.float32)
