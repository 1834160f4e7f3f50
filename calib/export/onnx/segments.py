"""Blocks of equally many tokens, each a segment with its own parameters (GEAR's and ZipCache's after the prompt). For the codec's
writer each block becomes a row of the batch.

A row has S blocks of n tokens; their fields are concatenated along the tokens, as in the runtime.
"""

from dataclasses import dataclass
from typing import Any

from calib.export.onnx.corrected import Repaired
from calib.export.onnx.graph import Value
from calib.export.onnx.scaled_channels import Scaled
from calib.export.onnx.shape import Fields
from calib.export.onnx.sparse import Pairs
from calib.export.onnx.uniform import Uniform
from calib.runtime.stages.codec.corrected import OVERFLOWED


@dataclass(frozen=True)
class Blocks:
    """Applies `writer` to each block of `tokens` tokens."""

    writer: Uniform | Pairs | Scaled | Repaired
    tokens: int

    def fields(self) -> Fields:
        """Returns the writer's fields; fields of a segment have one row for every block."""
        own = self.writer.fields()
        return {name: field._replace(tokens_per_row=field.tokens_per_row or self.tokens) for name, field in own.items()}

    def encode(self, x: Value, scales: Value | None = None) -> dict[str, Value]:
        """Returns the fields of x, float32 `[batch, kv_heads, S n, D]`; `scales` are `[batch, kv_heads, S, D]`, for `Scaled`."""
        own: Any = self.writer
        apart = self._apart(x, self.tokens)
        found = own.encode(apart) if scales is None else own.encode(apart, self._apart(scales, 1))
        overflowed_outliers = {
            name: part.reshape(x.size(0), -1).sum(1, keep=False) for name, part in found.items() if name == OVERFLOWED
        }
        return {
            name: self._together(part, x.size(0)) for name, part in found.items() if name != OVERFLOWED
        } | overflowed_outliers

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns x^, float32 `[batch, kv_heads, S n, D]`."""
        return self._together(self.writer.decode(self._blocks(block)), self._batch(block)).part(2, 0, -self.tokens)

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns q.x^ `[batch, kv_heads, rows, S n]`."""
        heads, channels = self.writer.shape
        own, batch, rows = self._blocks(block), self._batch(block), query.size(2)
        count = next(iter(own.values())).size(0) / batch
        repeated = query.reshape(0, 1, heads, -1, channels).expand(1, count, 1, 1, 1).reshape(-1, heads, rows, channels)
        found = self.writer.scores(repeated, own).reshape(batch, count, heads, rows, self.tokens)
        return found.permute(0, 2, 3, 1, 4).reshape(batch, heads, rows, -1).part(3, 0, -self.tokens)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns sum_t p_t x^_t `[batch, kv_heads, rows, D]`."""
        heads, channels = self.writer.shape
        own, rows = self._blocks(block), weights.size(2)
        split = weights.pad(3, 4, self.tokens).reshape(0, 0, 0, -1, self.tokens).permute(0, 3, 1, 2, 4)
        mixed = self.writer.mix(split.reshape(-1, heads, rows, self.tokens), own)
        return mixed.reshape(weights.size(0), -1, heads, rows, channels).sum(1, keep=False)

    def _blocks(self, block: dict[str, Value]) -> dict[str, Value]:
        """Returns the fields with one batch row for every block, and one more block of zeros, so that S = 0 is no special case."""
        found = {}
        for name, field in self.fields().items():
            part, rows = block[name], self.tokens // (field.tokens_per_row or 1)
            zeros = part.graph.constant([0], part.dtype).expand(part.size(0), part.size(1), rows, part.size(3))
            found[name] = self._apart(part.graph.join([part, zeros], 2), rows)
        return found

    @staticmethod
    def _batch(block: dict[str, Value]) -> Value:
        return next(iter(block.values())).size(0)

    @staticmethod
    def _apart(x: Value, tokens: int) -> Value:
        """Returns `[batch, h, S n, width]` as `[batch S, h, n, width]`."""
        batch, heads, rows, width = (x.size(axis) for axis in range(4))
        blocks = rows / tokens
        apart = x.reshape_to(batch, heads, blocks, tokens, width).permute(0, 2, 1, 3, 4)
        return apart.reshape_to(batch * blocks, heads, tokens, width)

    @staticmethod
    def _together(x: Value, batch: Value) -> Value:
        """Undoes `_apart`."""
        heads, tokens, width = (x.size(axis) for axis in (1, 2, 3))
        blocks = x.size(0) / batch
        together = x.reshape_to(batch, blocks, heads, tokens, width).permute(0, 2, 1, 3, 4)
        return together.reshape_to(batch, heads, blocks * tokens, width)
