"""Float64 oracle of GEAR: encodes one segment of one row of one layer, from the paper's equations alone (arXiv:2403.05527).

x ~ D^ + L + S: a quantised backbone D^ of the matrix without its outliers, a low-rank part L of the residual, and S, the difference
from both at the outliers. Nothing is packed. Where the runtime rounds to float16, so does the oracle; all else is float64 (or
float32, to measure the effect of float32).

A matrix `x [kv_heads, T, D]` is divided into rows in which outliers are found, and into groups that share parameters. Both are
given as **positions**: flat indices of entries of `x`, `[rows, N]`, each row in the runtime's order.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import floor
from typing import Any

import numpy as np
from importance.coding import halves
from importance.draws import counter_hash

# Errors of consecutive float32 operations, relative to the largest number in them: three or four for a scale, for a value in steps,
# and for the distance of an outlier; six or seven for a zero point.
FEW, SEVERAL = 2.0**-22, 2.0**-21

PRESETS: dict[str, dict[str, Any]] = {
    "gear": {},
    "gear_l": {"outliers": 0},
    "uniform": {"backbone": "uniform", "outliers": 0, "rank": 0},
    "group_wise": {"backbone": "channel", "outliers": 0, "rank": 0},
    "outlier_reduced": {"variant": "paper", "outliers": 0.05, "rank": 0},
}
RELEASED = {"backbone": "kcvt", "rank": 4}
PAPER = {"backbone": "uniform", "rank": 0.02}
LOOPS, CHEAP_LOOPS, NARROW = 3, 12, 192
HALF_MAX = 65504.0
UNIT = 2.0**-10  # the largest relative distance of neighbouring float16 numbers


def later(rank: int | float) -> int | float:
    """The default of `decode_rank` for this `rank`."""
    return min(rank, 2) if isinstance(rank, int) else rank


@dataclass(frozen=True)
class Spec:
    """All options of GEAR with their values; `Spec.of` fills in defaults.

    The options from `bits` to `group`, except `block`, may be mappings with entries "keys" and "values"; `of_stream` selects one.
    """

    variant: str
    backbone: str
    bits: Any
    outliers: Any
    rank: Any
    decode_rank: Any
    block: int
    group: Any
    per_head: bool = False
    seed: int = 0
    wide: bool = False  # keys or values exceed float16

    @classmethod
    def of(cls, method: str, **options: Any) -> "Spec":
        """The options of `gear` or one of its presets, with defaults filled in."""
        given = PRESETS[method] | {name: value for name, value in options.items() if name != "statistics"}
        full = {"variant": "released"} | given
        full = (PAPER if full["variant"] == "paper" else RELEASED) | full
        if "decode_rank" not in given:
            rank = full["rank"]
            full["decode_rank"] = {s: later(r) for s, r in rank.items()} if isinstance(rank, dict) else later(rank)
        kivi = full["backbone"] == "kivi"
        return cls(**{"bits": 2 if kivi else 4, "outliers": 0.02, "block": 64 if kivi else 20, "group": 64} | full)

    def of_stream(self, stream: str) -> "Spec":
        """The options with each mapping replaced by its entry for "keys" or "values"."""
        own = {name: option[stream] for name, option in vars(self).items() if isinstance(option, dict)}
        return replace(self, **own) if own else self

    def stored(self, y: np.ndarray) -> np.ndarray:
        """`y` rounded to float16; numbers beyond its range are rounded to float32 if the layer is `wide`, else clamped."""
        half = np.clip(y, -HALF_MAX, HALF_MAX).astype(np.float16).astype(y.dtype)
        return np.where(abs(y) > HALF_MAX, y.astype(np.float32), half) if self.wide else half


@dataclass(frozen=True)
class Segment:
    """An encoded segment `x [kv_heads, T, D]`; all arrays have this shape."""

    decoded: np.ndarray  # D^
    outliers: np.ndarray  # bool
    residual: np.ndarray  # R = x - D^, 0 at the outliers
    low_rank: np.ndarray  # L from the stored factors
    delta: np.ndarray  # x - D^ - L at the outliers as stored, 0 elsewhere
    optimum: np.ndarray  # the best approximation of R with L's rank: its truncated singular value decomposition
    codes: np.ndarray  # q
    unit: np.ndarray  # error of x^ if every stored number of L and S is off by a float16 unit, as independent errors
    overflow: int  # entries beyond a calibrated threshold for which there was no slot
    doubts: int  # codes and parameters that float32 may round differently

    @property
    def approximation(self) -> np.ndarray:
        """x^."""
        return self.decoded + self.low_rank + self.delta


def encode_segment(
    x: np.ndarray,
    spec: Spec,
    stream: str,
    layer: int = 0,
    first: bool = True,
    thresholds: tuple[np.ndarray, np.ndarray] | None = None,
    basis: np.ndarray | None = None,
    dtype: type = np.float64,
) -> Segment:
    """Encode one segment `x [kv_heads, T, D]` of the keys or the values (`stream`) of a row.

    `first`: it is the row's first segment. Calibrated `thresholds` (low, high) broadcast to `x`. Of a calibrated `basis [kv_heads,
    r or more, D]` the first r vectors are used, for each head's matrix, whatever the variant.
    """
    x, spec = np.asarray(x, dtype=dtype), spec.of_stream(stream)
    positions = rows(x.shape, spec, stream)
    outliers, overflow = ranked(x, positions, spec) if thresholds is None else beyond(x, positions, spec, thresholds)
    codes, decoded, doubts = quantised(filled(x, outliers, positions, spec), outliers, spec, stream)
    residual = np.where(outliers, 0, x - decoded)
    low_rank, optimum, unit = approximated(residual, spec, layer, spec.rank if first else spec.decode_rank, basis)
    exact = np.where(outliers, x - decoded - low_rank, 0)
    delta = spec.stored(exact)
    if unit.any():
        unit = np.where(outliers, UNIT * abs(delta), unit)
    else:  # without factors only the difference itself may be rounded differently
        moved = _moved(exact, FEW * (abs(x) + abs(decoded))) & ~_halfway(exact, delta)
        doubts += int(moved[outliers].sum())
    return Segment(decoded, outliers, residual, low_rank, delta, optimum, codes, unit, overflow, doubts)


def by_token(shape: tuple[int, ...]) -> np.ndarray:
    """Positions in the order of the matrix T x (heads * D), `[T, heads * D]`: column h D + c."""
    return np.arange(np.prod(shape)).reshape(shape).transpose(1, 0, 2).reshape(shape[1], -1)


def by_channel(shape: tuple[int, ...]) -> np.ndarray:
    """Positions of each (head, channel) over the tokens: `[heads * D, T]`."""
    return by_token(shape).T


# --- 1, 2: outliers ---------------------------------------------------------------------------------------------------


def rows(shape: tuple[int, ...], spec: Spec, stream: str) -> np.ndarray:
    """Positions of the rows in which outliers are found, `[rows, N]`."""
    if spec.variant == "paper":
        return by_token(shape).reshape(1, -1)
    if stream == "keys":
        return by_channel(shape)
    return by_token(shape).reshape(-1, shape[2]) if spec.per_head else by_token(shape)


def per_side(spec: Spec, length: int) -> int:
    """Number of outliers at each end of a row of `length` entries."""
    return min(max(1, floor(exactly(spec.outliers) / 2 * length)), length // 2) if spec.outliers else 0


def exactly(share: float) -> Fraction:
    """A share as an exact decimal fraction, so that .29 of 100 is 29."""
    return Fraction(repr(share))


def ranked(x: np.ndarray, positions: np.ndarray, spec: Spec) -> tuple[np.ndarray, int]:
    """The mask of the largest and smallest entries of every row, and an overflow of 0."""
    count, found = per_side(spec, positions.shape[1]), np.zeros(x.size, dtype=bool)
    order = np.take_along_axis(positions, x.ravel()[positions].argsort(axis=1, kind="stable"), 1)
    found[order[:, :count]] = found[order[:, positions.shape[1] - count :]] = True
    return found.reshape(x.shape), 0


def beyond(
    x: np.ndarray, positions: np.ndarray, spec: Spec, thresholds: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, int]:
    """The mask of entries below the low or above the high threshold, at each end the first ones for which a row has slots; and the
    number of entries without a slot."""
    count, found, overflow = per_side(spec, positions.shape[1]), np.zeros(x.size, dtype=bool), 0
    for side in (x < thresholds[0], x > thresholds[1]):
        for row in positions:
            mine = row[side.ravel()[row]]
            found[mine[:count]] = True
            overflow += max(0, len(mine) - count)
    return found.reshape(x.shape), overflow


def filled(x: np.ndarray, outliers: np.ndarray, positions: np.ndarray, spec: Spec) -> np.ndarray:
    """`x` with outliers replaced by 0 (paper) or by the mean of their row's other entries (released)."""
    result = np.where(outliers, 0, x)
    if spec.variant == "released":
        rest = (~outliers).ravel()[positions].sum(1)
        mean = result.ravel()[positions].sum(1) / np.maximum(rest, 1)
        at = np.zeros(x.size, dtype=x.dtype)
        at[positions] = mean[:, None]
        result = np.where(outliers, at.reshape(x.shape), x)
    return result


# --- 3: the backbone --------------------------------------------------------------------------------------------------


def groups(shape: tuple[int, ...], spec: Spec, stream: str) -> np.ndarray:
    """Positions of the groups that share a scale and a zero point, `[groups, N]`."""
    tokens, channels = by_token(shape), by_channel(shape)
    per_head = tokens.reshape(-1, shape[2])
    match spec.backbone, stream:
        case "uniform", _:
            return tokens.reshape(1, -1)
        case ("channel", _) | ("kcvt", "keys"):
            return channels
        case "kcvt", _:
            return per_head if spec.per_head else tokens
        case "kivi", "keys":
            return channels.reshape(-1, spec.group)
        case "kivi", _:
            return per_head.reshape(-1, min(spec.group, shape[2]))
    raise ValueError(spec.backbone)


def quantised(x: np.ndarray, outliers: np.ndarray, spec: Spec, stream: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes and D^ of `x`, and the number of parameters, and of codes that are no outliers, that float32 may round differently."""
    at, levels = groups(x.shape, spec, stream), 2**spec.bits - 1
    parts = x.ravel()[at]
    high, low = parts.max(1, keepdims=True), parts.min(1, keepdims=True)
    middle, half = (high + low) / 2, (high - low) / 2
    exact = 2 * half / levels, middle - half
    scale, zero = map(spec.stored, exact)
    errors = FEW * exact[0], SEVERAL * abs(parts).max(1, keepdims=True)
    moved = [_moved(y, error) for y, error in zip(exact, errors, strict=True)]
    position = np.where(scale > 0, (parts - zero) / np.where(scale > 0, scale, 1), 0) + 0.5
    codes = np.clip(np.floor(position), 0, levels)
    doubt = FEW * (8 if spec.wide else 1) * (abs(position) + 1)
    below, above = (np.clip(np.floor(position + sign * doubt), 0, levels) != codes for sign in (-1, 1))
    # A quotient exactly between two codes (of 16-bit tokens) is exact in float32 too.
    narrow = (below | above) & (position != np.floor(position)) & ~outliers.ravel()[at]
    doubts = sum(map(np.sum, moved)) + narrow.sum()
    result = [np.empty_like(x) for _ in range(2)]
    for array, values in zip(result, (codes, codes * scale + zero), strict=True):
        array.ravel()[at] = values
    return *result, int(doubts)


def _moved(y: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Where an error of this size in `y` may change the stored float16 number by more than the error."""
    near, other = halves(np.clip(y, -HALF_MAX, HALF_MAX), error)
    return (abs(near - other) > error) & (abs(y) < HALF_MAX)  # larger parameters are stored in float32


def _halfway(y: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Where `y` is half-way between two float16 numbers: such a sum of 16-bit numbers is exact in float32 too."""
    other = 2 * y - stored
    return (other != stored) & (np.float16(other) == other)


# --- 5: low rank ------------------------------------------------------------------------------------------------------


def rank_of(rank: int | float, tokens: int, width: int) -> int:
    """The rank of a matrix of `tokens` x `width`: a share of its smaller side, at least 1, or a number, at most that side."""
    most = min(tokens, width)
    if not rank:
        return 0
    return min(rank if isinstance(rank, int) else max(1, floor(exactly(rank) * most)), most)


def approximated(
    residual: np.ndarray, spec: Spec, layer: int, rank: int | float, basis: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """L = A B^T, the best approximation of this rank, and the `unit` of L (see `Segment`), each in the shape of `residual`."""
    whole = spec.variant == "paper" and basis is None
    parts = residual.ravel()[by_token(residual.shape)][None] if whole else residual
    count = rank_of(rank, *parts.shape[1:])
    results = [np.zeros_like(parts) for _ in range(3)]
    for head, part in enumerate(parts if count else []):
        b = iterated(part, start(spec.seed, layer, head, part.shape[1], count)) if basis is None else basis[head].T
        b = spec.stored(b[:, :count].astype(part.dtype))
        a = spec.stored(part @ b)
        left, sizes, right = np.linalg.svd(part, full_matrices=False)
        unit = UNIT * np.sqrt((2 * a**2 + part**2 @ b**2) @ (b**2).T)  # of A, of B, and of B in A = R B
        for result, values in zip(
            results, (a @ b.T, left[:, :count] * sizes[:count] @ right[:count], unit), strict=True
        ):
            result[head] = values
    if whole:
        heads, tokens, width = residual.shape
        results = [result[0].reshape(tokens, heads, width).transpose(1, 0, 2) for result in results]
    return results[0], results[1], results[2]


def loops(tokens: int, width: int) -> int:
    """Rounds of the power iteration: CHEAP_LOOPS for a short or narrow matrix, else LOOPS."""
    return CHEAP_LOOPS if tokens <= width or width <= NARROW else LOOPS


def iterated(residual: np.ndarray, b: np.ndarray) -> np.ndarray:
    """An orthonormal basis `[W, r]` of the dominant right singular directions of `residual [T, W]`, by power iteration from `b`."""
    b = b.astype(residual.dtype)
    for _ in range(loops(*residual.shape)):
        b = np.linalg.qr(residual.T @ (residual @ b))[0]
    return b


@lru_cache
def start(seed: int, layer: int, head: int, width: int, rank: int) -> np.ndarray:
    """The start B0 of the power iteration, float32 `[W, r]`: hashes of seed, layer, head and position, scaled to [-1, 1)."""
    draws = [counter_hash(seed, layer, head, position) for position in range(width * rank)]
    return (np.array(draws, dtype=np.float64) / 2**31 - 1).astype(np.float32).reshape(width, rank)
