"""Trellis-coded levels: the counterpart of `kernels/trellis` and `runtime/stages/codec/trellis.py`. The Viterbi search is unrolled
over the components."""

import numpy as np

from calib.export.onnx.graph import Value
from calib.export.onnx.words import CPU, WordCodesWriter
from calib.kernels.trellis.reference import FAR, OUTSIDE, STATES, SUBSETS

# State 2 m + u is reached from the states m and m + 4, with the subset of levels 2 z1 + z0 (`kernels/trellis/reference.py`).
BEFORE = [state // 2 for state in range(STATES)]
SUBSET = [
    [2 * ((later + m + u) % 2) + m // 2 for m in range(STATES // 2) for u in range(2)] for later in range(2)
]  # fmt: skip


class TrellisWords(WordCodesWriter):
    """Writer of `TrellisQuant`, in which the path so far allows half of the levels."""

    def stored(self, y: Value) -> Value:
        """Returns the codes u + 2 f of the path with the least error."""
        half = self._halves()
        at = self._along_path(y) * (2 * half) + (2 * half - 0.5)
        at = y.graph.where(at > -OUTSIDE, at, -OUTSIDE).op("Min", y.graph.constant(SUBSETS * (half - 1) + OUTSIDE))
        path = self._best_path(at, half - 1)
        free = _nearest((at - _subsets(path).cast(np.float32)) * (1 / SUBSETS), half - 1)
        return self._in_planes(free.cast(np.int32) * 2 + path)

    def told(self, codes: Value) -> Value:
        """Returns the levels' numbers i = 4 f + 2 z1 + z0."""
        stored = self._along_path(codes)
        return self._in_planes(stored / 2 * 4 + _subsets(stored & 1))

    def _best_path(self, at: Value, top: np.ndarray) -> Value:
        """Returns the stored bit u of each component on the path with the least error.

        int32 `[batch, kv_heads, tokens, components]`, in the order of the path like `at`.
        """
        graph, count = at.graph, self.codec.components
        errors = self._squared_errors(at, top)
        ways = [errors.entries(4, SUBSET[later]).split(3, [1] * count) for later in range(2)]
        shape = graph.join([at.size(0), at.size(1), at.size(2), graph.constant([STATES], np.int64)], 0)
        cost = graph.constant([0.0] + [FAR] * (STATES - 1), np.float32).expand(shape)
        came = []
        for low, high in zip(*ways, strict=True):
            low, high = (
                way.reshape(0, 0, 0, STATES) + cost.entries(3, [state + later for state in BEFORE])
                for way, later in ((low, 0), (high, STATES // 2))
            )
            came.append((high < low).cast(np.int64) * (STATES // 2) + np.array(BEFORE))
            cost = low.op("Min", high)
        states = [cost.op("ArgMin", dtype=np.int64, axis=3, keepdims=1, select_last_index=0)]
        for step in came[:0:-1]:
            states.append(step.gather(3, states[-1]))
        return graph.join(states[::-1], 3).cast(np.int32) & 1

    def _squared_errors(self, at: Value, top: np.ndarray) -> Value:
        """Returns the squared error of the nearest level of each subset, minus the least of the four, in the order of the path.

        float32 `[batch, kv_heads, tokens, components, 4]`.
        """
        offset = np.arange(SUBSETS, dtype=np.float32) / SUBSETS
        away = (at * (1 / SUBSETS)).reshape(0, 0, 0, -1, 1) - offset
        away = away - _nearest(away, top[:, None])
        squared = away * away
        weights = self.codec.step_weights(CPU).numpy()[:, self._path]  # [kv_heads, components]
        return (squared - squared.min(4)) * (SUBSETS**2 * weights)[:, None, :, None]

    def _halves(self) -> np.ndarray:
        """Returns 2^(b-1) of each component of b bits, in the order of the path, float32."""
        return np.array([2.0 ** (width - 1) for width in self.codec.widths] * max(self.codec.counts), np.float32)

    @property
    def _path(self) -> list[int]:
        """The indices of the components in the order of the path, word by word."""
        words = max(self.codec.counts)
        return [field * words + word for word in range(words) for field in range(len(self.codec.widths))]

    def _along_path(self, x: Value) -> Value:
        """Returns `[..., components]`, given plane by plane, in the order of the path."""
        return x.entries(3, self._path)

    def _in_planes(self, x: Value) -> Value:
        """Undoes `_along_path`."""
        return x.entries(3, np.argsort(self._path).tolist())


def _subsets(u: Value) -> Value:
    """Returns the subset 2 z1 + z0 of each component of paths with bits `u`, int32 `[..., components]`."""
    one, two, three = (_later(u, by) for by in (1, 2, 3))
    return (u + one + three & 1) * 2 + two


def _later(u: Value, by: int) -> Value:
    """Returns u of `by` components before; 0 before the first component."""
    ahead = u.op("Pad", u.graph.dims([0, 0, 0, by, 0, 0, 0, 0]))
    return ahead.part(3, 0, u.size(3))


def _nearest(at: Value, top: np.ndarray) -> Value:
    """Returns f, 0 ... `top`, of the nearest level of a subset; `at` is the distance from its first level in units of four
    steps."""
    return at.op("Round").at_least(0.0).op("Min", at.graph.constant(top))
