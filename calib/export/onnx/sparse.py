"""Pairs of atoms and coefficients: the counterpart of `kernels/matching_pursuit` and `runtime/stages/codec/sparse.py`.

V vectors of d channels (chunks of tokens) are approximated by s pairs each, of a dictionary of N atoms.
"""

from dataclasses import dataclass

import numpy as np

from calib.export.onnx.coefficients import decoded, encoded, kept
from calib.export.onnx.graph import Value
from calib.export.onnx.packing import as_int16, pack_bytes, unpack_bytes, unsigned
from calib.export.onnx.shape import Field, Fields, Shape
from calib.kernels.matching_pursuit.reference import DEPENDENT
from calib.kernels.pack.reference import bytes_per_token
from calib.runtime.stages.codec import Sparse


@dataclass(frozen=True)
class Pairs:
    """The fields `indices`, `coefficients` and, if these are integer codes, their `scale`."""

    codec: Sparse
    shape: Shape
    fp32_params: bool

    def fields(self) -> Fields:
        """Returns the fields, each with one row for every token."""
        heads, count = self.shape.heads, self.codec.pairs
        index = (np.int16, count) if self.codec.index == "int16" else (np.uint8, bytes_per_token(count, self._bits))
        named = {"indices": index} | kept(self.codec, self.fp32_params)
        return {name: Field(dtype, heads, 1, width) for name, (dtype, width) in named.items()}

    def encode(self, x: Value) -> dict[str, Value]:
        """Returns the fields of x, float32 `[batch, kv_heads, tokens, D]`."""
        vectors = x.reshape(-1, self._width)
        pairs = self._orthogonal(vectors) if self.codec.orthogonal else self._matching(vectors)
        index, coefficients = (part.reshape(x.size(0), self.shape.heads, -1, self.codec.pairs) for part in pairs)
        index = index.cast(np.int32)
        packed = as_int16(index) if self.codec.index == "int16" else pack_bytes(index, self._bits, self.codec.pairs)
        return {"indices": packed} | encoded(coefficients, self.codec, self.fp32_params)

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns x^, the sum of coefficients times atoms, float32 `[batch, kv_heads, tokens, D]`."""
        index, coefficients = block["indices"], decoded(block, self.codec)
        if self.codec.index == "int16":
            index = unsigned(index)
        else:
            index = unpack_bytes(index, self._bits, self.codec.pairs)
        chosen = self._atoms(index).take(index.reshape(-1, self.codec.sparsity))  # [V, s, d]
        summed = (chosen * coefficients.reshape(-1, self.codec.sparsity, 1)).sum(1, keep=False)
        return summed.reshape(index.size(0), self.shape.heads, -1, self.shape.channels)

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns q.x^; the keys are decoded first, as the runtime does for a tile."""
        return query @ self.decode(block).permute(0, 1, 3, 2)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns sum_t p_t x^_t."""
        return weights @ self.decode(block)

    def _matching(self, residual: Value) -> tuple[Value, Value]:
        """Returns matching pursuit's indices, int64, and coefficients, float32, both `[V, s]`, of vectors `[V, d]`."""
        index, coefficients = [], []
        for _ in range(self.codec.sparsity):
            position, atom = self._strongest(residual)
            part = (residual * atom).sum(1)
            residual = residual - atom * part
            index.append(position)
            coefficients.append(part)
        return residual.graph.join(index, 1), residual.graph.join(coefficients, 1)

    def _orthogonal(self, residual: Value) -> tuple[Value, Value]:
        """Returns the same by orthogonal matching pursuit.

        The chosen atoms are T Q with orthonormal rows Q; x^ = (x Q^T) Q, and the coefficients c solve c T = x Q^T.
        """
        graph, width = residual.graph, self._width
        bases = graph.constant(np.zeros((1, 0, width), np.float32)).expand(residual.size(0), 0, width)  # Q, [V, k, d]
        # inside: rows of T before the diagonal, [V, k]; lengths: its diagonal; parts: x Q^T; index: the atoms' indices.
        inside: list[Value] = []
        lengths: list[Value] = []
        parts: list[Value] = []
        index: list[Value] = []
        for _ in range(self.codec.sparsity):
            position, atom = self._strongest(residual)
            # Gram-Schmidt twice: the second pass removes what the rounding of the first left.
            before, rest = _without(atom, bases)
            again, rest = _without(rest, bases)
            length, whole = ((part * part).sum(1).op("Sqrt") for part in (rest, atom))
            new = length > whole * DEPENDENT
            length = graph.where(new, length, 1.0)
            basis = rest * (new.cast(np.float32) / length)
            part = (residual * basis).sum(1)
            residual = residual - basis * part
            bases = graph.join([bases, basis.reshape(-1, 1, width)], 1)
            for kept_so_far, found in ((parts, part), (index, position), (inside, before + again), (lengths, length)):
                kept_so_far.append(found)
        left, coefficients = graph.join(parts, 1), []  # back substitution: the last coefficient first
        for row in reversed(range(self.codec.sparsity)):
            coefficients.append(left.part(1, row, row + 1) / lengths[row])
            left = left.part(1, 0, row) - inside[row] * coefficients[-1]
        return graph.join(index, 1), graph.join(coefficients[::-1], 1)

    def _strongest(self, residual: Value) -> tuple[Value, Value]:
        """Returns the index, int64 `[V, 1]`, of the first atom with the largest |residual . atom|, and the atom `[V, d]`."""
        atoms = self._atoms(residual)
        position = (residual @ atoms.permute(1, 0)).abs().argmax(1)
        return position, atoms.take(position.reshape(-1))

    def _atoms(self, like: Value) -> Value:
        """Returns the artifact's atoms, float32 `[N, d]`."""
        assert self.codec.offline is not None
        return like.graph.constant(self.codec.offline.tensor.numpy()).cast(np.float32)

    @property
    def _width(self) -> int:
        return self.shape.channels // self.codec.chunks

    @property
    def _bits(self) -> int:
        return max(1, (self.codec.atoms - 1).bit_length())


def _without(x: Value, bases: Value) -> tuple[Value, Value]:
    """Returns the components of `x [V, d]` along `bases [V, k, d]`, float32 `[V, k]`, and x without them."""
    parts = bases @ x.reshape(0, -1, 1)
    inside = (parts * bases).sum(1, keep=False)
    return parts.reshape(0, 0), x - inside
