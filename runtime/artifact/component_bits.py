"""A budget of bits for the components of a whole model: reverse water-filling in whole words.

Keys and values lie in the basis of their calibrated components (`stages/transform/basis.py`), where errors count equally, and
`errors[..., b]` says what component j costs at b = 0 ... 8 bits. All layers, heads, keys and values compete: a bit goes where
it takes most off the sum. What is stored is whole words of 16 bits (`kernels/pack`):

- a layer's keys, and its values, have one **pattern**: the widths of a word's fields, such as (6, 4, 3, 2, 1);
- a head has W words a token: its W best components have the first field's width, the next W the second's, and so on. Heads of
  128 channels and more have words in pairs, which kernels load at once.

For a price of a word every head takes the W that is worth most, and every stream the pattern that serves its heads best;
the price is halved and doubled until the budget is met, and what is left goes word by word. A pattern a head, and not a
stream, would cost kernels a launch a head; a width a component, and not a run of W, a mask a code.
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
TINY = 1e-30  # of the largest price, one below any
ROUGH = 8  # one of so many patterns says what a word's price will be about
PAIRED = 128  # channels from which on words come in pairs
SOON = 32  # steps after which they get longer: errors of no fit can put the price 1e30 lower
NEAR = 1.05  # how near a price has to come: what is left over goes word by word


@dataclass(frozen=True)
class Words:
    """What a layer's keys or values are packed in: `widths` of a word's fields, best components first, and each head's words
    a token."""

    widths: tuple[int, ...]
    counts: tuple[int, ...]

    def bits_of(self, head: int) -> list[int]:
        """The width of each component of a head, from the best; those without a field are not listed."""
        return [width for width in self.widths for _ in range(self.counts[head])]


@dataclass(frozen=True)
class Allocation:
    """Words of every layer's keys and values.

    Attributes:
        streams: "keys" and "values", by layer.
        bits: per value of an encoded token.
        errors: predicted, of "keys" and "values", by layer and head: sums over components.
    """

    streams: Mapping[str, tuple[Words, ...]]
    bits: float
    errors: Mapping[str, tuple[tuple[float, ...], ...]]

    @property
    def error(self) -> float:
        """Predicted: the sum of all components' errors."""
        return math.fsum(error for own in self.errors.values() for heads in own for error in heads)


class Allocator:
    """Errors of a model's components, made ready for any budget.

    Args:
        errors: of "keys" and "values", float `[layers, kv_heads, D, 9]`, components from the best, errors falling with bits, each
            at most 1e12.
        size_bytes: what a token's sizes take in each stream: part of the budget, of which codes get the rest.

    Raises ValueError where heads are too small for words.
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
        # Every layer's plan asks for the whole model's allocation.
        self._known: dict[tuple[str, float], Allocation] = {}

    @property
    def least_bits(self) -> float:
        """Of a budget: a word a token, or a pair, for the keys and the values of every layer, and sizes."""
        return self.unit * WORD_BITS / (self.heads * self.channels) + self.size_bits

    def at_bits(self, bits: float) -> Allocation:
        """The least error at so many bits per value. Raises ValueError for a budget out of reach."""
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
        """Few bits with at most this error, the fewest to some per cent. Raises ValueError where no budget does it."""
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
        """Two prices of a word, near each other: at the lower one `much` is bought, and at the higher one it is not."""
        # A word at the highest price is worth nobody's while; some of the patterns say what the price will be about.
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
        """At a price of a word: each stream's pattern `[streams]`, and words of its heads `[streams, heads]`."""
        costs, words = (curves + price * self.units).min(-1)
        chosen = costs.sum(1).argmin(-1)
        index = chosen[:, None, None].expand(-1, self.heads, 1)
        counts = words.gather(2, index)[:, :, 0]
        # A stream without any word has no page: its best head gets one.
        empty = counts.sum(1) == 0
        worth = _of(curves[..., :2], chosen)
        counts[empty, (worth[..., 0] - worth[..., 1]).argmax(1)[empty]] = 1
        return chosen, counts

    def _spent(self, chosen: Tensor, counts: Tensor, budget: int) -> Tensor:
        """What the price has left over goes where the next words take most off the error a word."""
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
    """The heads' errors by words under the streams' chosen patterns: `[streams, heads, words + 1]`."""
    index = chosen[:, None, None, None].expand(-1, curves.shape[1], 1, curves.shape[-1])
    return curves.gather(2, index)[:, :, 0]


def _errors(curves: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
    """Of each stream's heads, which have so many words: float64 `[streams, heads]`."""
    return _of(curves, chosen).gather(2, counts[..., None])[..., 0].double()


@lru_cache
def patterns() -> tuple[tuple[int, ...], ...]:
    """Widths of a word's fields that fill it, falling: every way to share 16 bits out, 8 at most to a field."""

    def shared(left: int, most: int) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for width in range(min(left, most), 0, -1):
            yield from ((width, *rest) for rest in shared(left - width, width))

    return tuple(shared(WORD_BITS, MOST_BITS))


def _curves(errors: Tensor, patterns: tuple[tuple[int, ...], ...], unit: int) -> Tensor:
    """The error of every head under every pattern with 0, 1, ... units of words: float32 `[streams, heads, patterns, units + 1]`.

    At most as many words as give every component the widest field.
    """
    channels = errors.shape[2]
    most = channels * MOST_BITS // (WORD_BITS * unit)
    sums = torch.nn.functional.pad(errors.double().cumsum(2), (0, 0, 1, 0))  # of the first n components
    planes = max(map(len, patterns))
    taken = torch.zeros(planes, MOST_BITS + 1, len(patterns), dtype=torch.float64)
    for number, widths in enumerate(patterns):
        for plane in range(planes):
            taken[plane, widths[plane] if plane < len(widths) else 0, number] = 1
    found = torch.empty(*errors.shape[:2], len(patterns), most + 1)
    for units in range(most + 1):
        ends = (torch.arange(planes + 1) * units * unit).clamp(max=channels)
        runs = sums[:, :, ends].diff(dim=2).flatten(2)  # [streams, heads, planes * 9]
        rest = sums[:, :, channels, 0] - sums[:, :, ends[-1], 0]
        found[..., units] = (runs @ taken.flatten(0, 1) + rest[..., None]).float()
    return found
