"""A store in two places: every token exact on the host, and on the device a store that finds the ones to fetch."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.attend.request import AttendRequest
from calib.runtime.files.state import State, branch
from calib.runtime.held_tier import HeldTier
from calib.runtime.offload.fetched_pool import FetchedPool
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.store import Footprint, LayerContext, Store


class OffloadStore(ABC):
    """`low` on the device, `host` with all tokens, and the pairs that are `pool` of the device for now.

    `plan` is a `OffloadPlan`.
    """

    def __init__(
        self,
        plan: Any,
        low: Store,
        host: OrderedStore,
        keys: Tensor,
        values: Tensor,
        sequences: SequenceState,
        context: LayerContext,
    ) -> None:
        """Both stores empty; the first keys and values fix shapes and dtypes."""
        self.low, self.host, self.context = low, host, context
        self._plan = replace(plan, low=low.plan)  # whose tables are the store's own
        self.policy, self.sequences = plan.policy, sequences
        self.pool = FetchedPool(keys, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadStore":
        """Behind what is under way."""
        self.pool.side.wait()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def plan(self) -> Any:
        """The stages, the device's part where that is."""
        return replace(self._plan, low=self.low.plan)

    @property
    def observes(self) -> bool:
        """Whether storing on the device needs the queries."""
        return self.low.observes

    def prepare(self, forward: Forward) -> None:
        """Room in both stores."""
        self.pool.side.wait()  # where pages grow they are copied, and no copy to them may be under way
        self.low.prepare(forward)
        self.host.prepare(_host_forward(forward))

    @abstractmethod
    def attend(self, request: AttendRequest) -> Tensor:
        """Attention over what the device holds and what is fetched for it; changes which tokens the device holds exactly."""

    @abstractmethod
    def fetchable(self, length: int) -> int:
        """Tokens that a step may fetch for a row that holds `length`."""

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Into both stores, the host first: a token may be fetched as soon as the device has no exact one."""
        on_host = self.keys_on_host(forward, keys)
        # Freed as soon as every layer has stored.
        columns = [own for own in forward.columns or () if own.device == values.device]
        with self.pool.side.work(on_host, values, *columns):
            self.host.store(_host_forward(forward), on_host, values)
        self.low.store(forward, keys, values)

    def keys_on_host(self, forward: Forward, keys: Tensor) -> Tensor:
        """The keys as the host keeps them, all rows' with their padding; as they are where nothing else is said."""
        return keys

    def on_device(self, request: AttendRequest) -> Tensor:
        """Attention over what the device holds; the attention of a speculative token is no reason to keep one."""
        forward, fetched = request.forward, request.fetched
        if not (forward.speculative and request.observe and self.observes):
            return self.low.attend(request)
        output = self.low.attend(request._replace(observe=False))
        if forward.width:
            again = None if fetched is None else replace(fetched, asks=False)
            self.low.attend(request._replace(given=request.given.of_columns(slice(forward.width)), fetched=again))
        return output

    def exact_on_host(self, request: AttendRequest) -> Tensor:
        """Attention over every token as the host has it, fetched tile by tile."""
        self.pool.side.wait()
        return self.host.attend(request._replace(forward=_host_forward(request.forward), observe=False, fetched=None))

    def encodes(self, forward: Forward) -> bool:
        """See `Store.encodes`."""
        return False

    def branch(self, forward: Forward) -> Hashable:
        """See `Store.branch`."""
        return None

    def graph_key(self, forward: Forward) -> Hashable | None:
        """See `Store.graph_key`: what a step fetches lies in memory of its own each time."""
        return None

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        self.pool.side.wait()
        self.low.permute(sources, kept[:-1])
        self.host.permute(sources, kept[-1:])
        self.pool.permute(sources)

    def to(self, device: torch.device) -> None:
        """Moves what is on the device; the host's part stays, and is seen from there."""
        self.pool.side.wait()
        self.low.to(device)
        self._plan = self.plan
        self.host.to(device)
        self.pool.to(device)

    def state(self) -> State:
        """Of both stores, and what is fetched."""
        self.pool.side.wait()
        return {"low": self.low.state(), "host": self.host.state(), "residents": self.pool.state()}

    def restore(self, state: State) -> None:
        """See `state`."""
        self.low.restore(branch(state, "low"))
        self.host.restore(branch(state, "host"))
        self.pool.restore(branch(state, "residents"), self.sequences.lengths, self.policy.entries)

    def read_back(self, row: int) -> tuple[Tensor, Tensor]:
        """See `Store.read_back`: exact, from the host."""
        self.pool.side.wait()
        return self.host.read_back(row)

    def footprint(self) -> Footprint:
        """Of the device's part, with the fetched tokens; the host's apart."""
        weight = self.low.footprint()
        weight.kinds["fetched"] += self.pool.bytes()
        weight.host += self.host.footprint().host
        return weight

    def tiers_of(self, row: int) -> list[HeldTier]:
        """The device's tiers, and every token on the host; fetched copies are in no tier."""
        return self.low.tiers_of(row) + self.host.tiers_of(row)

    def on_host(self) -> list[Tensor]:
        """The pages of the host's part."""
        return self.host.on_host()

    def overflowed_outliers(self) -> int:
        """Of the device's part."""
        return self.low.overflowed_outliers()


def _host_forward(forward: Forward) -> Forward:
    assert forward.host_forward is not None, "a sequence state without the host's"
    return forward.host_forward
