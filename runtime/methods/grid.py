"""Which options of a method a budget chooses, and the values that it tries (`calib tune`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """Declared beside a method's options, as its class variable `grid`.

    Combinations that the method refuses, for itself, for a model or for an artifact, are left out where they are tried.

    Args:
        by_layer: options that may differ from layer to layer, with their values: they say how a token is stored.
        shared: options that are the same in every layer: they say how many tokens lie where, and all layers share one
            count of that.
        fetched: the option that says how many exact pairs of each layer and KV head a step fetches from the host. It has no
            values to try: it follows from the link and the budget (`calib/tune/fetched.py`).
    """

    by_layer: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shared: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fetched: str | None = None

    def without(self, given: Mapping[str, Any]) -> "Grid":
        """The grid of what is left where some options are `given`."""
        by_layer, shared = (
            {name: values for name, values in part.items() if name not in given}
            for part in (self.by_layer, self.shared)
        )
        return Grid(by_layer, shared, None if self.fetched in given else self.fetched)

    def layers(self) -> Iterator[Options]:
        """Every combination of what may differ by layer; one that is empty where nothing may."""
        return combinations(self.by_layer)

    def globals(self) -> Iterator[Options]:
        """Every combination of what all layers share."""
        return combinations(self.shared)


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[Options]:
    """Every choice of one value of each option, in the order of the values."""
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))
