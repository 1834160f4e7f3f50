"""A budget of bits for the components of a whole model: reverse water-filling in whole words.

Keys and values are in the basis of their calibrated components (`stages/transform/basis.py`), where errors count equally, and
`errors[..., j, b]` is the error of component j at b = 0 ... 8 bits. All layers, heads, keys and values compete: a bit goes where
it reduces the sum of errors most. Codes are stored in whole words of 16 bits (`kernels/pack`):

- a layer's keys, and its values, have one **pattern**: the widths of a word's fields, such as (6, 4, 3, 2, 1);
- a head has W words a token: its W best components have the first field's width, the next W the second's, and so on. Heads of
  128 channels and more have words in pairs, which kernels load at once.

Each word costs a price (the Lagrange multiplier, in units of error). At a given price every head takes the W with the least error
plus cost, and every stream the pattern with the least sum over its heads. The price is searched until the budget is met, and the
words that are left are assigned one after the other. A pattern for each head would cost kernels a launch for each head; a width
for each component, not for runs of W, a mask for each code.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from calib.kernels.pack.reference import WORD_BITS
from calib.runtime.messages.printable import printable

MOST_BITS = 8
ROLES = ("keys", "values")
TINY = 1e-30  # times the largest price: below all prices
ROUGH = 8  # the price is first estimated with one of so many patterns
PAIRED = 128  # channels from which on words are in pairs
SOON = 32  # steps of the search after which steps get longer: made-up errors can put the price 1e30 lower
NEAR = 1.05  # the accuracy of a price, as a ratio: words that are left are assigned one by one


@dataclass(frozen=True)
class Words:
    """The words in which a layer's keys or values are packed: `widths` of a word's fields in bits, best components first, and
    `counts`, the number of words a token for each KV head."""

    widths: tuple[int, ...]
    counts: tuple[int, ...]

    def bits_of(self, head: int) -> list[int]:
        """The width of each component of a head, from the best; those without a field are not listed."""
        return [width for width in self.widths for _ in range(self.counts[head])]


@dataclass(frozen=True)
class Allocation:
    """The words of every layer's keys and values for one budget.

    Attributes:
        streams: for "keys" and "values" the words of each layer.
        bits: bits per value of an encoded token.
        errors: for "keys" and "values" the predicted error by layer and head, summed over components.
    """

    streams: Mapping[str, tuple[Words, ...]]
    bits: float
    errors: Mapping[str, tuple[tuple[float, ...], ...]]

    @property
    def error(self) -> float:
        """The predicted error of a token: the sum over all layers, heads and components."""
        return math.fsum(error for own in self.errors.values() for heads in own for error in heads)


class Allocator:
    """Distributes any budget of bits over the components of a model, given their errors.

    Args:
        errors: for "keys" and "values", float `[layers, kv_heads, D, 9]`, the best component first, errors falling with bits, each
            at most 1e12.
        size_bytes: bytes of a token's sizes in each stream of a layer, which the budget includes.

    Raises ValueError if heads are too small for words.
    """

    def __init__(self, errors: Mapping[str, Tensor], size_bytes: int = 0) -> None:
        self.layers, self.heads, self.channels = errors["keys"].shape[:3]
        self.size_bits = size_bytes * 8 / (self.heads * self.channels)
        self.patterns, self.unit = patterns(), 2 if self.channels >= PAIRED else 1
        if self.least_bits - self.size_bits > MOST_BITS or self.channels * MOST_BITS < self.unit * WORD_BITS:
            raise ValueError(
                f"{self.heads} KV heads of {self.channels} channels are less than a word of {WORD_BITS} bits; use another method"
            )
        both = torch.cat([errors[role] for role in ROLES])  # [streams, heads, D, 9]
        self.curves = _curves(both, self.patterns, self.unit)  # [streams, heads, patterns, units + 1]
        self.units = torch.arange(self.curves.shape[-1], dtype=self.curves.dtype)
        # Cached, because every layer's plan needs the whole model's allocation.
        self._known: dict[tuple[str, float], Allocation] = {}

    @property
    def least_bits(self) -> float:
        """The smallest budget, in bits per value: a word (or a pair) a token for keys and values of every layer, and sizes."""
        return self.unit * WORD_BITS / (self.heads * self.channels) + self.size_bits

    def at_bits(self, bits: float) -> Allocation:
        """Returns the allocation with the least error at `bits` per value; raises ValueError for a budget that cannot be met."""
        if type(bits) not in (float, int) or not self.least_bits <= bits <= MOST_BITS:
            raise ValueError(
                f"bits must be a number from {self.least_bits:.3g} (a word a layer) to {MOST_BITS}, "
                f"got {printable(bits)}; 2 is usual"
            )
        if ("bits", bits) not in self._known:
            budget = math.floor(
                (bits - self.size_bits) * 2 * self.layers * self.heads * self.channels / (WORD_BITS * self.unit) + 1e-9
            )
            _, price = self._prices(lambda curves, chosen, counts: int(counts.sum()) > budget)
            chosen, counts = self._bought(self.curves, price)
            self._known["bits", bits] = self._allocation(chosen, self._spent(chosen, counts, budget))
        return self._known["bits", bits]

    def at_error(self, error: float) -> Allocation:
        """Returns an allocation with at most this error, and nearly (to some per cent) the fewest bits for it; raises ValueError if
        no budget has so small an error."""
        least = self.at_bits(MOST_BITS).error
        if not error >= least:
            raise ValueError(
                f"no budget up to {MOST_BITS} bits has an error as small as {error:.3g}, the least is {least:.3g}"
            )

        def enough(curves: Tensor, chosen: Tensor, counts: Tensor) -> bool:
            return float(_errors(curves, chosen, counts).sum()) <= error

        if ("error", error) not in self._known:
            price, _ = self._prices(enough)
            self._known["error", error] = self._allocation(*self._bought(self.curves, price))
        return self._known["error", error]

    def _prices(self, much: Callable[[Tensor, Tensor, Tensor], bool]) -> tuple[float, float]:
        """Two prices of a word that are near each other: `much` holds for the words bought at the lower, not for the higher."""
        # At the highest price no word reduces the error by more than it costs. Some patterns give a first estimate of the price.
        top = price = float(self.curves[..., 0].max())
        tiny = TINY * top
        for curves, factor in ((self.curves[:, :, ::ROUGH], 4.0), (self.curves, NEAR)):
            low, high, tries = 0.0, price, 0
            while low <= tiny < high:
                if much(curves, *self._bought(curves, high / factor)):
                    low = high / factor
                else:
                    high, tries = high / factor, tries + 1
                    factor *= NEAR if tries > SOON else 1.0
            while high < top and much(curves, *self._bought(curves, high)):
                low, high = high, min(high * NEAR, top)
            while high > NEAR * max(low, tiny):
                middle = math.sqrt(max(low, tiny) * high)
                low, high = (middle, high) if much(curves, *self._bought(curves, middle)) else (low, middle)
            price = high
        return low, high

    def _bought(self, curves: Tensor, price: float) -> tuple[Tensor, Tensor]:
        """The best choice at a price of a word: each stream's pattern `[streams]`, its heads' words `[streams, heads]`."""
        costs, words = (curves + price * self.units).min(-1)
        chosen = costs.sum(1).argmin(-1)
        index = chosen[:, None, None].expand(-1, self.heads, 1)
        counts = words.gather(2, index)[:, :, 0]
        # A stream needs at least one word, to have pages: the head that gains most gets it.
        empty = counts.sum(1) == 0
        worth = _of(curves[..., :2], chosen)
        counts[empty, (worth[..., 0] - worth[..., 1]).argmax(1)[empty]] = 1
        return chosen, counts

    def _spent(self, chosen: Tensor, counts: Tensor, budget: int) -> Tensor:
        """Assigns the words of the budget that the price has left where they reduce the error most for each word."""
        curves, left = _of(self.curves, chosen).flatten(0, 1), budget - int(counts.sum())
        counts = counts.flatten()
        while left > 0:
            steps = torch.arange(1, min(left, curves.shape[1]) + 1)
            to = (counts[:, None] + steps).clamp(max=curves.shape[1] - 1)
            gains = (curves.gather(1, counts[:, None]) - curves.gather(1, to)) / steps
            best = int(gains.argmax())
            if gains.flatten()[best] <= 0:
                break
            unit, step = best // len(steps), best % len(steps) + 1
            counts[unit] += step
            left -= step
        return counts.unflatten(0, (-1, self.heads))

    def _allocation(self, chosen: Tensor, counts: Tensor) -> Allocation:
        found = [
            Words(self.patterns[pattern], tuple(self.unit * count for count in own))
            for pattern, own in zip(chosen.tolist(), counts.tolist(), strict=True)
        ]
        errors = [tuple(heads) for heads in _errors(self.curves, chosen, counts).tolist()]
        values = 2 * self.layers * self.heads * self.channels
        return Allocation(
            {"keys": tuple(found[: self.layers]), "values": tuple(found[self.layers :])},
            int(counts.sum()) * self.unit * WORD_BITS / values + self.size_bits,
            {"keys": tuple(errors[: self.layers]), "values": tuple(errors[self.layers :])},
        )


def _of(curves: Tensor, chosen: Tensor) -> Tensor:
    """The heads' errors by number of words, with the patterns chosen for the streams: `[streams, heads, words + 1]`."""
    index = chosen[:, None, None, None].expand(-1, curves.shape[1], 1, curves.shape[-1])
    return curves.gather(2, index)[:, :, 0]


def _errors(curves: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
    """The errors of each stream's heads with `counts` words: float64 `[streams, heads]`."""
    return _of(curves, chosen).gather(2, counts[..., None])[..., 0].double()


@lru_cache
def patterns() -> tuple[tuple[int, ...], ...]:
    """All patterns: falling widths of fields, at most 8 bits each, that fill a word of 16 bits."""

    def shared(left: int, most: int) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for width in range(min(left, most), 0, -1):
            yield from ((width, *rest) for rest in shared(left - width, width))

    return tuple(shared(WORD_BITS, MOST_BITS))


def _curves(errors: Tensor, patterns: tuple[tuple[int, ...], ...], unit: int) -> Tensor:
    """The error of every head with every pattern at 0, 1, ... units of words: float32 `[streams, heads, patterns, units + 1]`.

    A unit is a word or a pair of words; there are at most as many as fill when all components have the widest field.
    """
    channels = errors.shape[2]
    most = channels * MOST_BITS // (WORD_BITS * unit)
    sums = torch.nn.functional.pad(errors.double().cumsum(2), (0, 0, 1, 0))  # of the first n components
    planes = max(map(len, patterns))
    taken = torch.zeros(planes, MOST_BITS + 1, len(patterns), dtype=torch.float64)
    for number, widths in enumerate(patterns):
        for plane in range(planes):
            taken[plane, widths[plane] if plane < len(widths) else 0, number] = 1
    found = torch.empty(*errors.shape[:2], len(patterns), most + 1, dtype=torch.float32)
    for units in range(most + 1):
        ends = (torch.arange(planes + 1) * units * unit).clamp(max=channels)
        runs = sums[:, :, ends].diff(dim=2).flatten(2)  # [streams, heads, planes * 9]
        rest = sums[:, :, channels, 0] - sums[:, :, ends[-1], 0]
        found[..., units] = (runs @ taken.flatten(0, 1) + rest[..., None]).float()
    return found
