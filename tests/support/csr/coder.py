"""Float64 oracle of CSR's codec for the keys or the values of one row of one layer: its dictionary, and the x^ that float32 may
store.

n is tokens, D head_dim, d the channels of a vector (D / chunks), F the tokens of the row's first chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product

import numpy as np
from csr.coefficients import choices, stored
from csr.corrections import Corrected, Corrections
from csr.dictionary import sample
from csr.pursuit import REACH, pursue, readings, rebuilt
from csr.rotation import rotated, spread
from csr.spec import Spec

WAYS = 20000  # most candidates tried for a stored token and head: near-ties of atoms times borders of coefficients


class Coder:
    """Encodes tokens of one stream by its dictionary, and decodes pairs. Keys are rotated back to position 0 (before RoPE) first.

    `offline [N, d]` are the artifact's atoms, float16 numbers; `frequencies` are RoPE's, unused for values.
    """

    def __init__(self, spec: Spec, stream: str, layer: int, offline: np.ndarray, frequencies: np.ndarray) -> None:
        self.spec, self.stream, self.layer = spec, stream, layer
        self.frequencies = frequencies if stream == "keys" else frequencies[:0]
        self.atoms, self.sure = offline, True
        self.orthogonal = spec.pursuit == "orthogonal"
        self.corrections = Corrections.of(spec)

    def back(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Tokens `[..., n, D]` as they are encoded: keys before RoPE, values unchanged."""
        return rotated(tokens, -positions, self.frequencies)

    def vectors(self, y: np.ndarray) -> np.ndarray:
        """Split tokens `[..., D]` into vectors `[..., chunks, d]`."""
        return y.reshape(*y.shape[:-1], self.spec.chunks(self.stream), -1)

    def items(self, tokens: np.ndarray) -> np.ndarray:
        """Vectors `[F * kv_heads * chunks, d]` of the first chunk `[kv_heads, F, D]`, token by token."""
        y = self.back(tokens, np.arange(tokens.shape[1]))
        return flat(self.vectors(y))

    def sizes(self, tokens: np.ndarray) -> np.ndarray:
        """For each entry of `items`, the magnitude of the numbers from which the rotation computes it."""
        return flat(self.vectors(spread(tokens, len(self.frequencies))))

    def measure(self, tokens: np.ndarray) -> None:
        """Add the row's online atoms, sampled from its first chunk `[kv_heads, F, D]`."""
        position = (self.spec.seed, self.layer, self.stream)
        steps = self.spec.steps(self.stream)
        share = self.spec.reverse_share
        found = sample(self.items(tokens), self.atoms, self.spec.online, steps, self.orthogonal, position, share)
        self.atoms, self.sure = found.atoms, found.sure

    def encode(self, tokens: np.ndarray, positions: np.ndarray, tier: int = 0) -> list["Word"]:
        """Encode `tokens [n, D]` of one head at `positions [n]`."""
        y, steps = self.back(tokens, positions), self.spec.steps(self.stream, tier)
        filled, outliers = self.corrections.split(y)
        vectors = self.vectors(filled)
        n, chunks, width = vectors.shape
        index, coefficient = pursue(vectors.reshape(-1, width), self.atoms, steps, self.orthogonal)
        kept = stored(coefficient.reshape(n, -1), self.spec.coefficients, self.spec.wide).reshape(-1, steps)
        sparse = rebuilt(index, kept, self.atoms).reshape(n, chunks * width)
        return [
            Word(self, steps, int(position), *parts)
            for position, *parts in zip(positions, y, filled, outliers, sparse, strict=True)
        ]

    def forward(self, y: np.ndarray, position: int) -> np.ndarray:
        """`y [D]` with RoPE at `position`; values unchanged."""
        return rotated(y[None], np.array([position]), self.frequencies)[0]


def flat(vectors: np.ndarray) -> np.ndarray:
    """`[kv_heads, n, chunks, d]` -> `[n * kv_heads * chunks, d]`, token by token."""
    return vectors.swapaxes(0, 1).reshape(-1, vectors.shape[-1])


@dataclass(frozen=True)
class Word:
    """One encoded token of one head: `y [D]` before encoding, `filled` with outliers replaced, `outliers` their mask, and `sparse`,
    the sum of its stored pairs."""

    coder: Coder
    steps: int
    position: int
    y: np.ndarray
    filled: np.ndarray
    outliers: np.ndarray
    sparse: np.ndarray

    @property
    def approximation(self) -> np.ndarray:
        """x^ `[D]`, with RoPE for keys, in exact arithmetic."""
        return self.coder.forward(self.corrected(self.sparse).nominal, self.position)

    def corrected(self, sparse: np.ndarray) -> Corrected:
        """x^ with corrections, from the sum of the pairs `sparse [D]`."""
        return self.coder.corrections.around(self.y, self.filled, self.outliers, sparse)

    def error(self, found: np.ndarray) -> float:
        """The distance of a stored token `[D]` from the nearest x^ that float32 may give, in units of the tolerance REACH |y|."""
        back = self.coder.back(found[None], np.array([self.position]))[0]
        allowed = REACH * np.linalg.norm(self.y) + 1e-30
        least = np.inf
        for sparse in islice(self.candidates(), WAYS):
            least = min(least, self.corrected(sparse).distance(back) / allowed)
            if least <= 1:
                break
        return float(least)

    def candidates(self) -> Iterator[np.ndarray]:
        """All sums of pairs that float32 may give, the exact one first."""
        yield self.sparse
        spec, atoms = self.coder.spec, self.coder.atoms
        vectors, least = self.coder.vectors(self.filled), REACH * np.linalg.norm(self.y) / 32
        paths = [list(readings(x, atoms, self.steps, self.coder.orthogonal)) for x in vectors]
        for taken in product(*paths):
            coefficient = np.concatenate([c for _, c, _ in taken])
            error = np.concatenate([np.full(len(c), doubt) for _, c, doubt in taken])
            cuts = np.cumsum([len(c) for _, c, _ in taken])[:-1]
            if not len(coefficient):
                yield np.zeros_like(self.filled)
                continue
            for kept in choices(coefficient, error, spec.coefficients, spec.wide, least):
                parts = zip(np.split(kept, cuts), taken, strict=True)
                yield np.concatenate([part @ atoms[index] for part, (index, _, _) in parts])
