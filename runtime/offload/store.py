"""A store on host and device: every token exact on the host, and on the device a store that finds the ones to fetch."""

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
    """`low` is the store on the device, `host` holds all tokens exactly, and `pool` has the pairs fetched to the device.

    `plan` is an `OffloadPlan`. Subclasses implement one policy each.
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
        """Both stores are empty; the first keys and values fix shapes and dtypes."""
        self.low, self.host, self.context = low, host, context
        self._plan = replace(plan, low=low.plan)  # with the store's own tables
        self.policy, self.sequences = plan.policy, sequences
        self.pool = FetchedPool(keys, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadStore":
        """Copies the store after pending work on the side stream."""
        self.pool.side.wait()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def plan(self) -> Any:
        """The plan, with the tables of the device's part on its device."""
        return replace(self._plan, low=self.low.plan)

    @property
    def observes(self) -> bool:
        """Whether storing on the device needs the queries."""
        return self.low.observes

    def prepare(self, forward: Forward) -> None:
        """Makes room in both stores."""
        self.pool.side.wait()  # growing pages copies them, so no write to them may be pending
        self.low.prepare(forward)
        self.host.prepare(_host_forward(forward))

    @abstractmethod
    def attend(self, request: AttendRequest) -> Tensor:
        """Attention over what the device holds and what is fetched for it; changes which tokens are fetched."""

    @abstractmethod
    def fetchable(self, length: int) -> int:
        """How many tokens a step may fetch for a row that holds `length`."""

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores new tokens in both stores, the host first: a token may be fetched as soon as the device no longer has it
        exactly."""
        on_host = self.keys_on_host(forward, keys)
        # Tensors that are freed as soon as every layer has stored.
        columns = [own for own in forward.columns or () if own.device == values.device]
        with self.pool.side.work(on_host, values, *columns):
            self.host.store(_host_forward(forward), on_host, values)
        self.low.store(forward, keys, values)

    def keys_on_host(self, forward: Forward, keys: Tensor) -> Tensor:
        """The keys as the host keeps them, for all rows with their padding; unchanged unless a subclass says otherwise."""
        return keys

    def on_device(self, request: AttendRequest) -> Tensor:
        """Attention over what the device holds; a speculative token's attention does not count in the saliency of others."""
        forward, fetched = request.forward, request.fetched
        if not (forward.speculative and request.observe and self.observes):
            return self.low.attend(request)
        output = self.low.attend(request._replace(observe=False))
        if forward.width:
            again = None if fetched is None else replace(fetched, asks=False)
            self.low.attend(request._replace(given=request.given.of_columns(slice(forward.width)), fetched=again))
        return output

    def exact_on_host(self, request: AttendRequest) -> Tensor:
        """Exact attention over every token, from the host, tile by tile."""
        self.pool.side.wait()
        return self.host.attend(request._replace(forward=_host_forward(request.forward), observe=False, fetched=None))

    def encodes(self, forward: Forward) -> bool:
        """As `Store.encodes`."""
        return False

    def branch(self, forward: Forward) -> Hashable:
        """As `Store.branch`."""
        return None

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`: None, because each step fetches into new memory."""
        return None

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        self.pool.side.wait()
        self.low.permute(sources, kept[:-1])
        self.host.permute(sources, kept[-1:])
        self.pool.permute(sources)

    def to(self, device: torch.device) -> None:
        """Moves the device's part to `device`; the host's part stays in host memory, mapped for `device`."""
        self.pool.side.wait()
        self.low.to(device)
        self._plan = self.plan
        self.host.to(device)
        self.pool.to(device)

    def state(self) -> State:
        """The state of both stores and of the fetched pairs."""
        self.pool.side.wait()
        return {"low": self.low.state(), "host": self.host.state(), "pool": self.pool.state()}

    def restore(self, state: State) -> None:
        """Fills both stores and the fetched pairs from `state`. Raises StateError where it does not fit."""
        self.low.restore(branch(state, "low"))
        self.host.restore(branch(state, "host"))
        self.pool.restore(branch(state, "pool"), self.sequences.lengths, self.policy.entries)

    def read_back(self, row: int) -> tuple[Tensor, Tensor]:
        """As `Store.read_back`: exact, from the host."""
        self.pool.side.wait()
        return self.host.read_back(row)

    def footprint(self) -> Footprint:
        """Bytes of the device's part, with the fetched tokens; the host's bytes are in `host`."""
        weight = self.low.footprint()
        weight.kinds["fetched"] += self.pool.bytes()
        weight.host += self.host.footprint().host
        return weight

    def tiers_of(self, row: int) -> list[HeldTier]:
        """The device's tiers, and every token on the host; fetched copies are in no tier."""
        return self.low.tiers_of(row) + self.host.tiers_of(row)

    def on_host(self) -> list[Tensor]:
        """The pages in host memory."""
        return self.host.on_host()

    def overflowed_outliers(self) -> int:
        """As `Store.overflowed_outliers`, of the device's part."""
        return self.low.overflowed_outliers()


def _host_forward(forward: Forward) -> Forward:
    assert forward.host_forward is not None, "a sequence state without the host's"
    return forward.host_forward
