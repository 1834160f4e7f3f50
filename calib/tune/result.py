"""Results of the search: the best setting by layer for a budget, the front over budgets, the best setting equal in all layers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calib.errors import UsageError
from calib.runtime.files.canonical_json import plain
from calib.runtime.methods.tuned import Choice
from calib.tune.allocation import TINY, cheapest, hull
from calib.tune.candidates import Candidate
from calib.tune.fetched import FetchedPairs
from calib.tune.measure import Measured

FRONT = 24  # number of budgets at which the front is computed


@dataclass(frozen=True)
class Setting:
    """A candidate for each measured layer, all with the same shared options.

    Attributes:
        chosen: the candidate of each layer.
        bits: bits per value of each layer's encoded tokens.
        losses: loss per token of each layer.
    """

    chosen: Sequence[Candidate]
    bits: Sequence[float]
    losses: Sequence[float]

    @property
    def mean_bits(self) -> float:
        """Bits per value of the whole model, whose layers have equally many values."""
        return sum(self.bits) / len(self.bits)

    @property
    def loss(self) -> float:
        """Loss of a token, summed over all layers, keys and values."""
        return sum(self.losses)


@dataclass(frozen=True)
class Search:
    """All candidates of a method, with their measured bits and losses."""

    method: str
    candidates: Sequence[Candidate]
    measured: Measured

    def at(self, budget: float, fetched: float = 0.0) -> Setting:
        """Returns the setting with the least loss within a budget, of which fetched pairs take `fetched` bits per value.

        Raises UsageError that names the possible range if no setting is within the budget.
        """
        left = budget - fetched
        found = [self._allocated(positions, left) for positions in self._groups()]
        found.append(self.uniform(left))  # it may be better than the greedy end of the allocation
        within = [setting for setting in found if setting is not None]
        if not within:
            low, high = (end + fetched for end in self.reach())
            raise UsageError(
                f"--bits {budget:g}: '{self.method}' takes {low:.3f} ... {high:.3f} bits per value with the options there are to "
                "choose; give a budget of at least the first, or fix fewer options"
            )
        return min(within, key=lambda setting: (setting.loss, setting.mean_bits))

    def uniform(self, budget: float) -> Setting | None:
        """Returns the best setting within a budget that has the same candidate in every layer; None if there is none."""
        found = [setting for setting in self.uniforms() if setting.mean_bits <= budget + TINY]
        return min(found, key=lambda setting: (setting.loss, setting.mean_bits), default=None)

    def uniforms(self) -> list[Setting]:
        """Returns a setting for each candidate that uses it in all layers."""
        return [self._setting([position] * len(self.measured.layers)) for position in range(len(self.candidates))]

    def reach(self) -> tuple[float, float]:
        """Returns the bits per value of the cheapest setting, and of the setting with the least loss."""
        ends = []
        for positions in self._groups():
            of_layers = [hull(*pair) for pair in zip(*self._parts(positions), strict=True)]
            ends.append([self._setting([positions[corners[end]] for corners in of_layers]) for end in (0, -1)])
        return min(low.mean_bits for low, _ in ends), min(
            (high for _, high in ends), key=lambda high: high.loss
        ).mean_bits

    def front(self) -> list[Setting]:
        """Returns the best settings for `FRONT` budgets that are spaced geometrically over `reach`, without duplicates."""
        low, high = self.reach()
        found: list[Setting] = []
        for step in range(FRONT):
            setting = self.at(low * (high / low) ** (step / (FRONT - 1)) + TINY)
            if not found or setting.loss < found[-1].loss:
                found.append(setting)
        return found

    def choice(
        self,
        budget: float,
        setting: Setting,
        layers: int,
        measured_on: dict[str, Any],
        fetched: FetchedPairs | None = None,
    ) -> Choice:
        """Returns the artifact's record of a budget's setting, for a model of `layers` layers; its bits include `fetched` pairs."""
        own = dict(zip(self.measured.layers, setting.chosen, strict=True))
        figures = dict(zip(self.measured.layers, zip(setting.bits, setting.losses, strict=True), strict=True))
        apart = 0.0 if fetched is None else fetched.bits
        one = self.uniform(budget - apart)
        predicted = {
            "bits": setting.mean_bits + apart,
            "loss": setting.loss,
            "layers": [{"bits": figures[n][0], "loss": figures[n][1]} if n in figures else None for n in range(layers)],
            "uniform": one
            and {
                "options": {**one.chosen[0].options, **one.chosen[0].own},
                "bits": one.mean_bits + apart,
                "loss": one.loss,
            },
        }
        options = dict(setting.chosen[0].options)
        if fetched is not None:
            options[fetched.option] = fetched.k
            predicted["fetched"] = asdict(fetched)
        return Choice(
            self.method,
            budget,
            plain(options, "options"),
            [plain(own[n].own, "options") if n in own else None for n in range(layers)],
            plain(predicted, "predicted"),
            plain(measured_on, "measured_on"),
        )

    def _groups(self) -> list[list[int]]:
        """Returns groups of candidates' indices that can be combined in one model: those with the same shared options."""
        groups: dict[int, list[int]] = {}
        for position, candidate in enumerate(self.candidates):
            groups.setdefault(candidate.shared, []).append(position)
        return list(groups.values())

    def _parts(self, positions: Sequence[int]) -> tuple[list[list[float]], list[list[float]]]:
        """Returns the bits and losses of some candidates, by layer."""
        bits, loss = (
            [[of[position] for position in positions] for of in part]
            for part in (self.measured.bits, self.measured.loss)
        )
        return bits, loss

    def _allocated(self, positions: Sequence[int], budget: float) -> Setting | None:
        found = cheapest(*self._parts(positions), budget)
        return None if found is None else self._setting([positions[number] for number in found])

    def _setting(self, positions: Sequence[int]) -> Setting:
        return Setting(
            [self.candidates[position] for position in positions],
            [of[position] for of, position in zip(self.measured.bits, positions, strict=True)],
            [of[position] for of, position in zip(self.measured.loss, positions, strict=True)],
        )
