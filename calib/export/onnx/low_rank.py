"""The low-rank part A B^T of a residual: the counterpart of `kernels/low_rank` and `runtime/stages/correction/low_rank.py`, for
one segment per row. ONNX has no QR decomposition: columns are made orthonormal by Householder reflections."""

from dataclasses import dataclass

import numpy as np
import torch

from calib.export.onnx.graph import Value
from calib.export.onnx.halves import kept_dtype, stored
from calib.export.onnx.shape import Field, Fields, Shape
from calib.kernels.low_rank.reference import NARROW
from calib.kernels.to_half import stored as stored_tensor
from calib.runtime.stages.correction import LowRank
from calib.runtime.stages.correction.low_rank import CHEAP_ROUNDS, ROUNDS

TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Factors:
    """The fields `coefficients` A and, unless the artifact has it, `basis` B of a segment of at most `longest` tokens."""

    part: LowRank
    shape: Shape
    fp32_params: bool
    longest: int | None

    def fields(self) -> Fields:
        """Returns the fields: `coefficients` for every token, and r D numbers of `basis` for the segment, r being the rank."""
        heads, dtype = self.shape.heads, kept_dtype(self.fp32_params)
        if self.part.basis is not None:
            return {"coefficients": Field(dtype, heads, 1, int(self.part.rank))}
        return {
            "coefficients": Field(dtype, 1 if self.part.across_heads else heads, 1, "rank"),
            "basis": Field(dtype, heads, None, f"rank*{self.shape.channels}"),
        }

    def encode(self, residual: Value) -> dict[str, Value]:
        """Returns the fields of a residual, float32 `[batch, kv_heads, T, D]`."""
        if self.part.basis is not None:
            return {"coefficients": stored(residual @ self._known(residual).permute(0, 2, 1), self.fp32_params)}
        heads, channels = self.shape
        matrix = self.shape.merged(residual) if self.part.across_heads else residual
        rank = self._rank(matrix)
        # The coefficients are computed with the stored basis, so they compensate its rounding.
        basis = stored(self._iterated(matrix, rank).part(3, 0, rank), self.fp32_params)
        by_head = basis.reshape(0, heads, channels, -1)
        return {
            "coefficients": stored(matrix @ basis.cast(np.float32), self.fp32_params),
            "basis": by_head.permute(0, 1, 3, 2).reshape(0, heads, 1, -1),
        }

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns A B^T, float32 `[batch, kv_heads, T, D]`."""
        return block["coefficients"].cast(np.float32) @ self._basis(block)

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns (q B) A^T `[batch, kv_heads, rows, T]`."""
        shared = query @ _transposed(self._basis(block), self.part.basis is not None)
        return shared @ block["coefficients"].cast(np.float32).permute(0, 1, 3, 2)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns (p A) B^T `[batch, kv_heads, rows, D]`."""
        return (weights @ block["coefficients"].cast(np.float32)) @ self._basis(block)

    @property
    def _width(self) -> int:
        return self.shape.width if self.part.across_heads else self.shape.channels

    def _basis(self, block: dict[str, Value]) -> Value:
        """Returns B^T, float32 `[batch, kv_heads, r, D]`; without the batch axis if it is the artifact's."""
        if self.part.basis is not None:
            return self._known(block["coefficients"])
        return block["basis"].cast(np.float32).reshape(0, self.shape.heads, -1, self.shape.channels)

    def _known(self, like: Value) -> Value:
        """Returns the artifact's basis rounded as the runtime uses it, float32 `[kv_heads, r, D]`."""
        assert self.part.basis is not None
        return like.graph.constant(stored_tensor(self.part.basis[:, : int(self.part.rank)], False).float().numpy())

    def _rank(self, matrix: Value) -> Value:
        """Returns the rank of a matrix `[..., T, width]`, int64 `[1]`, as `LowRank.of_segment` does."""
        least = matrix.size(2).op("Min", matrix.graph.dims([self._width]))
        if type(self.part.rank) is int:
            return least.op("Min", matrix.graph.dims([self.part.rank]))
        share = (least.cast(np.float64) * float(self.part.rank) + 1e-9).op("Floor").cast(np.int64)
        return share.at_least(1).op("Min", least)

    def _iterated(self, matrix: Value, rank: Value) -> Value:
        """Returns orthonormal columns by power iteration, float32 `[batch, h, width, R]`, R the highest possible rank.

        Only the first `rank` columns are meaningful.
        """
        graph, heads, width = matrix.graph, 1 if self.part.across_heads else self.shape.heads, self._width
        highest = self.part.of_segment(self.longest or width, width)
        # The segment's first `rank` columns are taken from one sequence of draws; zero columns after them do not affect them.
        draws = self.part._start(heads, width, highest, torch.device("cpu")).reshape(heads, -1).numpy()
        start = graph.constant(draws).part(1, 0, rank * width).reshape(1, heads, width, rank)
        start = start.pad(3, 4, graph.dims([highest]) - rank)
        start = start.expand(matrix.size(0), heads, width, highest)
        rounds: Value = graph.constant([CHEAP_ROUNDS], np.int64)
        if width > NARROW:
            rounds = graph.where(matrix.size(2) <= width, rounds, ROUNDS)
        transposed = matrix.permute(0, 1, 3, 2)
        return graph.repeat(rounds, start, lambda basis: orthonormal(transposed @ (matrix @ basis), width, highest))


def orthonormal(columns: Value, width: int, count: int) -> Value:
    """Returns Q of the QR decomposition of `[batch, h, width, count]` by Householder reflections, with LAPACK's signs.

    For each column H = I - tau v v^T, v = (1, entries below / (first - beta)), beta = -sign(first) norm; H = I if all entries
    below are 0. The first r columns of Q do not depend on later columns.
    """
    graph = columns.graph
    # Scaling the columns does not change Q, and keeps their squares within float32.
    largest, rows = columns.abs().max(2, 3), graph.constant(np.arange(width)[:, None], np.float32)
    left, reflections = columns / largest.at_least(TINY), []
    for step in range(count):
        column = left.part(3, step, step + 1)
        first, below = column.part(2, step, step + 1), graph.where(rows > step, column, 0.0)
        tail = (below * below).sum(2)
        norm, flat = (first * first + tail).op("Sqrt"), tail <= 0.0
        beta = graph.where(first >= 0.0, -norm, norm)
        vector = graph.where(rows > step, below / graph.where(flat, 1.0, first - beta), (rows >= step).cast(np.float32))
        tau = graph.where(flat, 0.0, (beta - first) / graph.where(flat, 1.0, beta))
        reflections.append((vector, tau))
        left = _reflected(left, vector, tau)
    found = graph.constant(np.eye(width, count, dtype=np.float32))
    for vector, tau in reversed(reflections):
        found = _reflected(found, vector, tau)
    return found


def _reflected(x: Value, vector: Value, tau: Value) -> Value:
    return x - vector @ (vector.permute(0, 1, 3, 2) @ x * tau)


def _transposed(basis: Value, known: bool) -> Value:
    return basis.permute(0, 2, 1) if known else basis.permute(0, 1, 3, 2)
