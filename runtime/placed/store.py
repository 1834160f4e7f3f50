"""A store in two places: every token exact on the host, and on the device a store that finds the ones to fetch."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.beside import Beside
from calib.runtime.logits import Logits
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.placed.residents import Residents
from calib.runtime.rows import Forward, Rows
from calib.runtime.state import State, branch
from calib.runtime.store import Footprint, Given, Place, Store


class PlacedStore(ABC):
    """`low` on the device, `host` with all tokens, and the pairs that are `residents` of the device for now.

    `plan` is a `PlacedPlan`.
    """

    def __init__(
        self, plan: Any, low: Store, host: OrderedStore, keys: Tensor, values: Tensor, rows: Rows, place: Place
    ) -> None:
        """Both stores empty; the first keys and values fix shapes and dtypes."""
        self._plan, self.low, self.host, self.place = plan, low, host, place
        self.policy, self.rows = plan.policy, rows
        self.residents = Residents(keys, values)

    @property
    def plan(self) -> Any:
        """The stages, the device's part where that is."""
        return replace(self._plan, low=self.low.plan)

    @property
    def observes(self) -> bool:
        """Whether storing on the device needs the queries."""
        return self.low.observes

    def prepare(self, forward: Forward) -> None:
        """Room in both places."""
        self.residents.side.wait()  # where pages grow they are copied, and nothing may be on its way to them
        self.low.prepare(forward)
        self.host.prepare(_followed(forward))

    @abstractmethod
    def attend(
        self,
        forward: Forward,
        rows: range,
        logits: Logits,
        given: Given,
        observe: bool,
        beside: Beside | None = None,
    ) -> Tensor:
        """Attention over what the device holds and what is fetched for it; changes which tokens are residents."""

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Into both places, the host first: a token may be fetched as soon as the device has no exact one."""
        on_host = self.keys_on_host(forward, keys)
        with self.residents.side.work(on_host, values):
            self.host.store(_followed(forward), on_host, values)
        self.low.store(forward, keys, values)

    def keys_on_host(self, forward: Forward, keys: Tensor) -> Tensor:
        """The keys as the host keeps them, all rows' with their padding; as they are where nothing else is said."""
        return keys

    def on_device(
        self, forward: Forward, rows: range, logits: Logits, given: Given, observe: bool, beside: Beside | None = None
    ) -> Tensor:
        """Attention over what the device holds; what a guess looks at is no reason to keep a token."""
        if not (forward.guess and observe and self.observes):
            return self.low.attend(forward, rows, logits, given, observe, beside)
        output = self.low.attend(forward, rows, logits, given, False, beside)
        if forward.width:
            again = None if beside is None else replace(beside, asks=False)
            self.low.attend(forward, rows, logits, given.of_columns(slice(forward.width)), True, again)
        return output

    def exact_on_host(self, forward: Forward, rows: range, logits: Logits, given: Given) -> Tensor:
        """Attention over every token as the host has it, fetched tile by tile."""
        self.residents.side.wait()
        return self.host.attend(_followed(forward), rows, logits, given, observe=False)

    def block(self, forward: Forward) -> Hashable | None:
        """See `Store.block`: what a step fetches lies in memory of its own each time."""
        return None

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        self.residents.side.wait()
        self.low.permute(sources, kept[:-1])
        self.host.permute(sources, kept[-1:])
        self.residents.permute(sources)

    def to(self, device: torch.device) -> None:
        """Moves what is on the device; the host's part stays, and is seen from there."""
        self.residents.side.wait()
        self.low.to(device)
        self.host.to(device)
        self.residents.to(device)

    def state(self) -> State:
        """Of both places, and what is fetched."""
        self.residents.side.wait()
        return {"low": self.low.state(), "host": self.host.state(), "residents": self.residents.state()}

    def restore(self, state: State) -> None:
        """See `state`."""
        for name, part in (("low", self.low), ("host", self.host), ("residents", self.residents)):
            part.restore(branch(state, name))

    def footprint(self) -> Footprint:
        """Of the device's part, with the residents; the host's apart."""
        weight = self.low.footprint()
        weight.kinds["fetched"] += self.residents.bytes()
        weight.host += self.host.footprint().host
        return weight

    def on_host(self) -> list[Tensor]:
        """The pages of the host's part."""
        return self.host.on_host()

    def further(self) -> int:
        """Of the device's part."""
        return self.low.further()


def _followed(forward: Forward) -> Forward:
    assert forward.followed is not None, "a ledger without the host's"
    return forward.followed
