"""Outliers kept exact: the counterpart of `kernels/outliers` and `runtime/stages/correction/outliers.py`, one segment per row.

Outliers are searched in rows of N entries: a channel over the tokens, a token over the channels, or a whole matrix (`ranked`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from calib.export.onnx.graph import Dim, Graph, Value
from calib.export.onnx.halves import kept_dtype, stored
from calib.export.onnx.shape import Field, Fields, Shape
from calib.runtime.stages.correction import Outliers


class Found(NamedTuple):
    """Outliers of rows `[batch, h, m, N]`, k at each end of a row.

    positions: int64 `[batch, h, m, 2k]`. used: which of these slots are used, bool; None: all. mask: bool `[batch, h, m, N]`, True
    at the outliers. overflowed_outliers: int64 `[batch]`, entries beyond a threshold for which no slot was left; None without
    thresholds.
    """

    positions: Value
    used: Value | None
    mask: Value
    overflowed_outliers: Value | None


@dataclass(frozen=True)
class ExactEntries:
    """The fields `delta`, an outlier minus its value by all other parts, and its position, `tokens` and/or `channels`."""

    part: Outliers
    shape: Shape
    fp32_params: bool

    def fields(self) -> Fields:
        """Returns the fields, of every token or of the segment. Positions are int32 here; the runtime's pages use fewer bytes."""
        heads, ranked = 1 if self._across else self.shape.heads, self.part.ranked
        each, width = (None, "outliers") if self._length is None else (1, 2 * self.part.count(self._length))
        names = {"tokens": ["tokens"], "channels": ["channels"], "matrix": ["channels", "tokens"]}[ranked]
        positions = {name: Field(np.int32, heads, each, width) for name in names}
        return {"delta": Field(kept_dtype(self.fp32_params), heads, each, width)} | positions

    def find(self, x: Value) -> Found:
        """Returns the outliers of x, float32 `[batch, kv_heads, T, D]`."""
        rows, count = self._rows(x), self._count(x)
        if self.part.low is not None and self.part.high is not None:
            low, high = (self._threshold(x.graph, part) for part in (self.part.low, self.part.high))
            return _first_beyond(rows, low, high, count)
        top = _extreme(rows, count, largest=1)
        # In a constant row the same entries are largest and smallest: the second search excludes those found first.
        bottom = _extreme(_marked(rows, top, np.inf), count, largest=0)
        positions = x.graph.join([top, bottom], 3)
        nothing = x.graph.constant([0], np.float32).expand(rows.shape())
        return Found(positions, None, _marked(nothing, positions, 1.0) > 0.0, None)

    def filled(self, x: Value, found: Found) -> Value:
        """Returns `x` with its outliers replaced by the mean of the row's rest (fill "mean") or by 0."""
        where = x.graph.where
        rest = where(found.mask, 0.0, self._rows(x))
        if self.part.fill == "mean":
            left = (~found.mask).cast(np.float32).sum(3)
            rest = where(found.mask, rest.sum(3) / left.at_least(1.0), rest)
        return self._tokens(rest)

    def cleared(self, x: Value, found: Found) -> Value:
        """Returns `x` with 0 at the outliers."""
        return self._tokens(x.graph.where(found.mask, 0.0, self._rows(x)))

    def encode(self, distance: Value, found: Found) -> dict[str, Value]:
        """Returns the fields from `distance`, x minus codec and low-rank part, float32 `[batch, kv_heads, T, D]`."""
        delta = self._rows(distance).gather(3, found.positions)
        delta = stored(delta if found.used is None else delta * found.used.cast(np.float32), self.fp32_params)
        positions, heads = found.positions.cast(np.int32), self.shape.heads
        if self.part.ranked == "tokens":  # a list with channels running fastest
            named = {"delta": delta, "tokens": positions}
            return {name: part.permute(0, 1, 3, 2).reshape(0, heads, 1, -1) for name, part in named.items()}
        if self.part.ranked == "channels":
            return {"delta": delta, "channels": positions}
        token = positions / self.shape.width
        return {"delta": delta, "channels": positions - token * self.shape.width, "tokens": token}

    def decode(self, block: dict[str, Value], tokens: Value) -> Value:
        """Returns the deltas at their positions, 0 elsewhere: float32 `[batch, kv_heads, T, D]`, T being `tokens`."""
        delta, heads, channels = block["delta"].cast(np.float32), *self.shape
        rows: tuple[Dim, ...]
        if self.part.ranked == "tokens":
            rows = (heads, channels, tokens)
            delta, positions = (
                part.reshape(0, heads, -1, channels).permute(0, 1, 3, 2) for part in (delta, block["tokens"])
            )
        elif self.part.ranked == "channels":
            rows, positions = (
                ((1, tokens, self.shape.width) if self._across else (heads, tokens, channels)),
                block["channels"],
            )
        else:
            rows, positions = (1, 1, tokens * self.shape.width), block["tokens"] * self.shape.width + block["channels"]
        zeros = delta.graph.constant([0], np.float32).expand(delta.size(0), *rows)
        return self._tokens(zeros.op("ScatterElements", positions, delta, axis=3, reduction="add"))

    @property
    def _across(self) -> bool:
        return self.part.across_heads or self.part.ranked == "matrix"

    @property
    def _length(self) -> int | None:
        """Entries of a row; None if it depends on the number of tokens."""
        if self.part.ranked != "channels":
            return None
        return self.shape.width if self._across else self.shape.channels

    def _count(self, x: Value) -> Dim:
        """Returns k, the outliers at each end of a row, as `Outliers.count` does."""
        if self._length is not None:
            return self.part.count(self._length)
        length = x.size(2) if self.part.ranked == "tokens" else x.size(2) * self.shape.width
        share = (length.cast(np.float64) * (self.part.share / 2) + 1e-9).op("Floor").cast(np.int64)
        return share.at_least(1).op("Min", length / 2)

    def _threshold(self, graph: Graph, threshold: torch.Tensor) -> Value:
        """Returns a threshold as a constant that broadcasts against the rows of `_rows`."""
        array = threshold.float().numpy()
        if array.size == 1:
            return graph.constant(array.reshape(1, 1, 1, 1))
        if self.part.ranked == "tokens":
            return graph.constant(array.transpose(0, 2, 1)[None])
        if not self._across:
            return graph.constant(array[None])
        whole = np.broadcast_to(array, (self.shape.heads, 1, self.shape.channels))
        return graph.constant(whole.transpose(1, 0, 2).reshape(1, 1, 1, -1))

    def _rows(self, x: Value) -> Value:
        """Returns x `[batch, kv_heads, T, D]` as rows `[batch, h, m, N]`, the axis that is ranked being the last."""
        if self.part.ranked == "tokens":
            return x.permute(0, 1, 3, 2)
        if not self._across:
            return x
        merged = self.shape.merged(x)
        return merged if self.part.ranked == "channels" else merged.reshape(0, 1, 1, -1)

    def _tokens(self, rows: Value) -> Value:
        """Undoes `_rows`."""
        if self.part.ranked == "tokens":
            return rows.permute(0, 1, 3, 2)
        return self.shape.apart(rows) if self._across else rows


def _extreme(rows: Value, count: Dim, largest: int) -> Value:
    """Returns the positions of the `count` largest (`largest` 1) or smallest (0) entries of the last axis, int64."""
    ends = rows.graph.dims([count])
    return rows.graph.ops("TopK", rows, ends, outputs=2, dtypes=[None, np.int64], axis=3, largest=largest)[1]


def _marked(rows: Value, positions: Value, number: float) -> Value:
    """Returns `rows` with `number` at `positions` of the last axis."""
    filling = rows.graph.constant([number], np.float32).expand(positions.shape())
    return rows.op("ScatterElements", positions, filling, axis=3)


def _first_beyond(rows: Value, low: Value, high: Value, count: Dim) -> Found:
    """Returns the first `count` entries above `high` and the first `count` below `low`; unused slots have position 0."""
    graph, length = rows.graph, rows.size(3)
    most = graph.dims([count])
    # Entries beyond the threshold get falling numbers, all others 0: TopK returns the former in order of position.
    falling = (length - graph.up_to(length)).cast(np.int32)
    positions, used, masks, overflowed_outliers = [], [], [], []
    for beyond in (rows > high, rows < low):
        number = beyond.cast(np.int32)
        order = graph.where(beyond, falling, 0)
        found, position = graph.ops("TopK", order, most, outputs=2, dtypes=[None, np.int64], axis=3, largest=1)
        taken = found > 0
        positions.append(graph.where(taken, position, 0))
        used.append(taken)
        masks.append(beyond & (number.op("CumSum", graph.constant(3, np.int64)) <= most.cast(np.int32)))
        left = number.sum(3).cast(np.int64) - most
        overflowed_outliers.append(left.at_least(0).sum(1, 2, 3, keep=False))
    return Found(
        graph.join(positions, 3),
        graph.join(used, 3),
        masks[0] | masks[1],
        overflowed_outliers[0] + overflowed_outliers[1],
    )
