"""An axis of a chart: its range, its ticks, and the position of a value on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TICKS = 6  # approximate number of ticks on an axis
FAR = 8.0  # an axis is logarithmic if the largest value is at least so many times the smallest
PADDING = 0.06  # share of the axis on either side of the outermost values
STEPS = (1, 1.5, 2, 3, 5, 7)  # densest ticks within a decade


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`; if `logarithmic`, both ends are positive."""

    low: float
    high: float
    logarithmic: bool

    def place(self, value: float) -> float:
        """Position of a value on the axis: 0 at `low`, 1 at `high`."""
        low, high, value = (math.log(end) if self.logarithmic else end for end in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Rounds numbers within the axis."""
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
    """Returns an axis that covers all `values`, at least one; `ratios` allows a logarithmic axis for positive values."""
    low, high = min(values), max(values)
    if ratios and low > 0 and high / low >= FAR:
        spare = (high / low) ** PADDING
        return Axis(low / spare, high * spare, True)
    spare = PADDING * (high - low) or abs(high) * PADDING or 1.0
    return Axis(low - spare, high + spare, False)


def bits_axis(values: Sequence[float]) -> Axis:
    """Returns a logarithmic axis for bits per value, so that halving is the same distance everywhere."""
    low, high = min(values), max(values)
    spare = max(high / low, 2.0) ** PADDING
    return Axis(low / spare, high * spare, True)


def bits_ticks(axis: Axis) -> list[float]:
    """Ticks at powers of two and 1.5 times powers of two."""
    powers = range(math.floor(math.log2(axis.low)), math.ceil(math.log2(axis.high)) + 1)
    found = [step * 2.0**power for power in powers for step in (1, 1.5)]
    return [tick for tick in found if axis.low <= tick <= axis.high]
