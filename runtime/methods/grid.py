"""The options of a method that `calib tune` chooses for a budget, and the values that it tries."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """The search space of `calib tune` for one method; a method declares it as its class variable `grid`.

    `calib tune` skips combinations for which the method raises ValueError, whether for the options alone or with a model or an
    artifact.

    Args:
        by_layer: options that may differ from layer to layer, with the values to try: they decide how a token is stored.
        shared: options that are the same in every layer, with the values to try: they decide how many tokens are in each tier
            and window, a count that all layers share.
        fetched: the option that is the number of exact pairs that a step fetches from the host for each layer and KV head. It
            has no values to try: it follows from the bandwidth of the link and the budget (`calib/tune/fetched.py`).
    """

    by_layer: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shared: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fetched: str | None = None

    def without(self, given: Mapping[str, Any]) -> "Grid":
        """Returns the grid without the options that are already `given`."""
        by_layer, shared = (
            {name: values for name, values in part.items() if name not in given}
            for part in (self.by_layer, self.shared)
        )
        return Grid(by_layer, shared, None if self.fetched in given else self.fetched)

    def layers(self) -> Iterator[Options]:
        """Yields every combination of the `by_layer` options; one empty combination if there are none."""
        return combinations(self.by_layer)

    def globals(self) -> Iterator[Options]:
        """Yields every combination of the `shared` options; one empty combination if there are none."""
        return combinations(self.shared)


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[Options]:
    """Yields every choice of one value for each option, the last option varying fastest."""
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))
