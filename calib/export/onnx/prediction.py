"""Values predicted from the codes of their keys: the counterpart of `runtime/stages/prediction.py`."""

from dataclasses import dataclass

import numpy as np

from calib.export.onnx.graph import Value
from calib.export.onnx.shape import Fields
from calib.export.onnx.sized import SizedWords
from calib.export.onnx.words import CPU
from calib.runtime.stages.prediction import Prediction


@dataclass(frozen=True)
class Predicted:
    """The prediction M (k^ - mean_k) from the coded keys k^, whose writer is `keys`."""

    prediction: Prediction
    keys: SizedWords

    def fields(self) -> Fields:
        """Returns the keys' fields, with the prefix `keys.` that they have in the graphs of values."""
        return {f"keys.{name}": field for name, field in self.keys.fields().items()}

    def values(self, fields: dict[str, Value]) -> Value:
        """Returns the predictions, float32 `[batch, kv_heads, tokens, D]`, equal to the runtime's bit for bit."""
        codes, sizes = self._codes(fields)
        numbers = codes * 2.0 - self.keys.codec.codec.levels(CPU).numpy()
        summed = numbers.cast(np.float64) @ self._table(codes).cast(np.float64)
        return summed.cast(np.float32) * self.prediction.unit.numpy() * sizes

    def mix(self, weights: Value, fields: dict[str, Value]) -> Value:
        """Returns sum_t p_t of the predictions, `[batch, kv_heads, rows, D]`: M is applied to the weighted sum of keys' codes."""
        codes, sizes = self._codes(fields)
        sized = weights * sizes.permute(0, 1, 3, 2)
        numbers = sized @ codes * 2.0 - sized.sum(3) * self.keys.codec.codec.levels(CPU).numpy()
        return numbers @ self._table(codes).cast(np.float32) * self.prediction.unit.numpy()

    def _codes(self, fields: dict[str, Value]) -> tuple[Value, Value]:
        block = {name.removeprefix("keys."): field for name, field in fields.items()}
        return self.keys.words.numbers(block), self.keys.sizes(block)

    def _table(self, like: Value) -> Value:
        return like.graph.constant(self.prediction.table.numpy())
