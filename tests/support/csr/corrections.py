"""Float64 oracle of `corrections` around CSR's pairs: a token's outliers, and its quantised residual."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from csr.coefficients import HALF_MAX, half
from csr.pursuit import DOUBT
from csr.spec import Spec
from gear.oracle import UNIT, filled, ranked, rows
from importance.coding import decodings


@dataclass(frozen=True)
class Corrected:
    """All x^ `[choices, D]` of one token and head that float32 may give, the exact one first, and rounding errors `slack [D]`."""

    choices: np.ndarray
    slack: np.ndarray

    @property
    def nominal(self) -> np.ndarray:
        """x^ `[D]` of exact arithmetic."""
        return self.choices[0]

    def distance(self, found: np.ndarray) -> float:
        """|x^ - found|, taking for every entry the nearest choice, less the slack."""
        return float(np.linalg.norm(np.maximum(abs(self.choices - found).min(0) - self.slack, 0)))


@dataclass(frozen=True)
class Corrections:
    """Outliers of a token and head, and a uniform quantiser of the residual of its pairs; either may be absent."""

    outliers: float
    bits: int | None
    group: int | None
    wide: bool

    @classmethod
    def of(cls, spec: Spec) -> "Corrections":
        """The corrections of the option `corrections`."""
        asked = spec.corrections
        return cls(asked.get("outliers", 0), asked.get("residual_bits"), asked.get("residual_group"), spec.wide)

    def split(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `[kv_heads, n, D]` or `[n, D]` with outliers replaced by the mean of the token's other entries, and their mask."""
        if not self.outliers:
            return y, np.zeros(y.shape, dtype=bool)
        x = y.reshape(-1, *y.shape[-2:])
        form = SimpleNamespace(variant="released", per_head=True, outliers=self.outliers)
        positions = rows(x.shape, form, "values")
        found, _ = ranked(x, positions, form)
        return filled(x, found, positions, form).reshape(y.shape), found.reshape(y.shape)

    def around(self, y: np.ndarray, kept: np.ndarray, outliers: np.ndarray, sparse: np.ndarray) -> Corrected:
        """x^ of one token and head; `y`, `kept` (y with outliers replaced), the mask `outliers` and the sum of pairs are `[D]`."""
        found = sparse[None]
        if self.bits:
            left = np.where(outliers, 0, kept - sparse)
            found = sparse + self.quantised(left, DOUBT * (np.linalg.norm(kept) + np.linalg.norm(sparse)))
        short = y - found[0]
        unit = np.where(self.wide & (abs(short) > HALF_MAX), 2.0**-23, UNIT / 2)
        exact = np.where(outliers, y, found)
        # An outlier is stored as its distance from the decoded rest: it is off by half a float16 unit of the distance.
        return Corrected(exact, np.where(outliers, unit * abs(short) * (1 + 2.0**-8) + 2.0**-24, 0))

    def quantised(self, left: np.ndarray, error: float) -> np.ndarray:
        """The decoded residuals `[choices, D]` that float32 may give for `left [D]`, whose entries have errors up to `error`."""
        group = self.group or len(left)
        parts = left.reshape(-1, group)
        high, low, levels = parts.max(-1), parts.min(-1), 2**self.bits - 1
        if self.bits == 1:  # the levels are the middles of both halves of the range
            high, low = (3 * high + low) / 4, (3 * low + high) / 4
        scales = self.stored((high - low) / levels, 2 * error / levels)
        zeros = self.stored(low, error)
        spreads = [(s.repeat(group), z.repeat(group)) for s in scales for z in zeros]
        ways = [decodings(left + sign * error, spreads, self.bits) for sign in (0, -1, 1)]
        return np.concatenate(ways)

    def stored(self, y: np.ndarray, error: float) -> list[np.ndarray]:
        """A stored parameter, and the neighbour to which it may be rounded with an error of `error`."""
        near, low, high = (half(y + sign * error, self.wide) for sign in (0, -1, 1))
        return [near, np.where(low != near, low, high)]
