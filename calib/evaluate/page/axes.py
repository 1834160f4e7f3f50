"""An axis of a drawing: which numbers stand along it, and where."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TICKS = 6  # numbers along an axis, about
FAR = 8.0  # ratios of this size and more lie on a logarithmic axis
PADDING = 0.06  # of the axis, on either side of the outermost figures
STEPS = (1, 1.5, 2, 3, 5, 7)  # of a decade, as many of them as are wanted


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, logarithmic or not; both ends are positive where it is."""

    low: float
    high: float
    logarithmic: bool

    def place(self, value: float) -> float:
        """Where on the axis it lies: 0 at `low`, 1 at `high`."""
        low, high, value = (math.log(end) if self.logarithmic else end for end in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round numbers within the axis."""
        if not self.logarithmic:
            return linear_ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found: list[float] = []
        for steps in ((1,), (1, 3), (1, 2, 5), STEPS):
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [tick for tick in found if self.low <= tick <= self.high]
            if len(found) >= TICKS // 2:
                return found
        return found


def linear_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def axis_of(values: Sequence[float], ratios: bool) -> Axis:
    """An axis that holds all of `values`, at least one; `ratios` says whether they are compared by their ratio."""
    low, high = min(values), max(values)
    if ratios and low > 0 and high / low >= FAR:
        spare = (high / low) ** PADDING
        return Axis(low / spare, high * spare, True)
    spare = PADDING * (high - low) or abs(high) * PADDING or 1.0
    return Axis(low - spare, high + spare, False)


def bits_axis(values: Sequence[float]) -> Axis:
    """Bits are powers of two: half of them is as far at 2 as at 16."""
    low, high = min(values), max(values)
    spare = max(high / low, 2.0) ** PADDING
    return Axis(low / spare, high * spare, True)


def bits_ticks(axis: Axis) -> list[float]:
    """Powers of two and one and a half times those."""
    powers = range(math.floor(math.log2(axis.low)), math.ceil(math.log2(axis.high)) + 1)
    found = [step * 2.0**power for power in powers for step in (1, 1.5)]
    return [tick for tick in found if axis.low <= tick <= axis.high]
