"""Values predicted from the codes of their keys: the twin of `runtime/stages/prediction.py`."""

from dataclasses import dataclass

import numpy as np

from calib.export.onnx.graph import Value
from calib.export.onnx.shape import Fields
from calib.export.onnx.sized import SizedWords
from calib.export.onnx.words import CPU
from calib.runtime.stages.prediction import Prediction


@dataclass(frozen=True)
class Predicted:
    """M (k^ - mean_k), of keys that `keys` writes."""

    prediction: Prediction
    keys: SizedWords

    def fields(self) -> Fields:
        """The keys', by the names that other graphs than theirs have for them."""
        return {f"keys.{name}": field for name, field in self.keys.fields().items()}

    def values(self, fields: dict[str, Value]) -> Value:
        """Of tokens whose keys are encoded: float32 `[batch, kv_heads, tokens, D]`, the bits that the runtime has."""
        codes, sizes = self._codes(fields)
        numbers = codes * 2.0 - self.keys.codec.codec.levels(CPU).numpy()
        summed = numbers.cast(np.float64) @ self._table(codes).cast(np.float64)
        return summed.cast(np.float32) * self.prediction.unit.numpy() * sizes

    def mix(self, weights: Value, fields: dict[str, Value]) -> Value:
        """sum_t p_t of the predictions, `[batch, kv_heads, rows, D]`: codes of keys are mixed, and M meets the mixture."""
        codes, sizes = self._codes(fields)
        sized = weights * sizes.permute(0, 1, 3, 2)
        numbers = sized @ codes * 2.0 - sized.sum(3) * self.keys.codec.codec.levels(CPU).numpy()
        return numbers @ self._table(codes).cast(np.float32) * self.prediction.unit.numpy()

    def _codes(self, fields: dict[str, Value]) -> tuple[Value, Value]:
        block = {name.removeprefix("keys."): field for name, field in fields.items()}
        return self.keys.words.numbers(block), self.keys.sizes(block)

    def _table(self, like: Value) -> Value:
        return like.graph.constant(self.prediction.table.numpy())
