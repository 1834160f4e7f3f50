"""A codec with corrections: the counterpart of `runtime/stages/codec/corrected.py`."""

from dataclasses import dataclass

from calib.export.onnx.graph import Value
from calib.export.onnx.low_rank import Factors
from calib.export.onnx.outliers import ExactEntries, Found
from calib.export.onnx.scaled_channels import Scaled
from calib.export.onnx.shape import Fields, Shape
from calib.export.onnx.sparse import Pairs
from calib.export.onnx.uniform import Uniform
from calib.runtime.stages.codec.corrected import LOW_RANK, OUTLIERS, OVERFLOWED, RESIDUAL


@dataclass(frozen=True)
class Repaired:
    """x^ = D + L + Q + S: `codec` D with one or more of a low-rank part L, a quantised residual Q and outliers S."""

    codec: Uniform | Pairs | Scaled
    outliers: ExactEntries | None
    low_rank: Factors | None
    residual: Uniform | None

    @property
    def shape(self) -> Shape:
        """KV heads and channels."""
        return self.codec.shape

    def fields(self) -> Fields:
        """Returns the codec's fields, and those of each correction under its prefix."""
        fields = self.codec.fields()
        for prefix, part in self._parts():
            fields |= {prefix + name: field for name, field in part.fields().items()}
        return fields

    def encode(self, x: Value) -> dict[str, Value]:
        """Returns the fields of x, float32 `[batch, kv_heads, T, D]`, one segment per row.

        With thresholds, `OVERFLOWED` is the number of entries beyond them that are not stored because all slots are used.
        """
        found = None if self.outliers is None else self.outliers.find(x)
        filled = x if found is None or self.outliers is None else self.outliers.filled(x, found)
        block = self.codec.encode(filled)
        distance = x - self.codec.decode(block)
        for prefix, part in ((LOW_RANK, self.low_rank), (RESIDUAL, self.residual)):
            if part is not None:
                own = part.encode(self._cleared(distance, found))
                block |= {prefix + name: value for name, value in own.items()}
                distance = distance - part.decode(own)
        if found is not None and self.outliers is not None:
            block |= {OUTLIERS + name: value for name, value in self.outliers.encode(distance, found).items()}
            if found.overflowed_outliers is not None:
                block[OVERFLOWED] = found.overflowed_outliers
        return block

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns x^, float32 `[batch, kv_heads, T, D]`."""
        x = self.codec.decode(block)
        for prefix, part in ((LOW_RANK, self.low_rank), (RESIDUAL, self.residual)):
            if part is not None:
                x = x + part.decode(_part(prefix, block))
        return x if self.outliers is None else x + self._outlying(block)

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns q.x^ = q.D + (q B) A^T + q.Q + q.S, with S expanded to a matrix of the segment's size."""
        scores = self.codec.scores(query, block)
        for prefix, part in ((LOW_RANK, self.low_rank), (RESIDUAL, self.residual)):
            if part is not None:
                scores = scores + part.scores(query, _part(prefix, block))
        return scores if self.outliers is None else scores + query @ self._outlying(block).permute(0, 1, 3, 2)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns p.x^ = p.D + (p A) B^T + p.Q + p.S for attention weights p."""
        mixed = self.codec.mix(weights, block)
        for prefix, part in ((LOW_RANK, self.low_rank), (RESIDUAL, self.residual)):
            if part is not None:
                mixed = mixed + part.mix(weights, _part(prefix, block))
        return mixed if self.outliers is None else mixed + weights @ self._outlying(block)

    def _outlying(self, block: dict[str, Value]) -> Value:
        """Returns S: the outliers' deltas at their positions, 0 elsewhere, `[batch, kv_heads, T, D]`."""
        assert self.outliers is not None
        codes = block["words"] if "words" in block else block["indices"]
        return self.outliers.decode(_part(OUTLIERS, block), codes.size(2))

    def _cleared(self, distance: Value, found: Found | None) -> Value:
        return distance if found is None or self.outliers is None else self.outliers.cleared(distance, found)

    def _parts(self) -> list[tuple[str, ExactEntries | Factors | Uniform]]:
        parts = ((OUTLIERS, self.outliers), (LOW_RANK, self.low_rank), (RESIDUAL, self.residual))
        return [(prefix, part) for prefix, part in parts if part is not None]


def _part(prefix: str, block: dict[str, Value]) -> dict[str, Value]:
    return {name.removeprefix(prefix): value for name, value in block.items() if name.startswith(prefix)}
