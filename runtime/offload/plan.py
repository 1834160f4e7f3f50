"""The plan of a layer whose tokens are all on the host, with a second store on the device and a policy for fetching."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.offload.store import OffloadStore
from calib.runtime.offload.top_blocks import TopBlocksStore
from calib.runtime.offload.top_tokens import TopTokensStore
from calib.runtime.ordered.sequence_state import OrderedSequenceState
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.stages.contract import Codec
from calib.runtime.stages.placement import TopBlocks, TopTokens
from calib.runtime.store import LayerContext, Plan, Recoding

STORES: dict[type[Any], type[OffloadStore]] = {TopTokens: TopTokensStore, TopBlocks: TopBlocksStore}

HOST = LayerPlan.exact(on_host=True)


@dataclass(frozen=True)
class OffloadPlan(Plan):
    """`low` is the plan of the device's store, which holds every token or some; `policy` says which tokens are fetched."""

    low: Plan
    policy: TopTokens | TopBlocks

    on_host = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", self.low.with_positions())  # fetched tokens are matched by position

    @property
    def needs_rope(self) -> str | None:
        """As in the device's plan `low`."""
        return self.low.needs_rope

    @property
    def needs_token_ids(self) -> bool:
        """As in the device's plan."""
        return self.low.needs_token_ids

    @property
    def lacks_special_ids(self) -> bool:
        """As in the device's plan."""
        return self.low.lacks_special_ids

    def with_special_ids(self, special_ids: tuple[int, ...]) -> "OffloadPlan":
        """The same plan with these ids in the device's plan."""
        return replace(self, low=self.low.with_special_ids(special_ids))

    @property
    def lacks_key_bias(self) -> bool:
        """As in the device's plan."""
        return self.low.lacks_key_bias

    def with_key_bias(self, bias: Tensor) -> "OffloadPlan":
        """The same plan with the bias in the device's plan; tokens on the host are exact."""
        return replace(self, low=self.low.with_key_bias(bias))

    @property
    def speculative(self) -> bool:
        """Whether a decode step also has a speculative token."""
        return self.policy.speculates

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for stages of the device's plan that do not fit this head width or dtype."""
        self.low.check(head_dim, dtype)

    def sequences(self, layers: int, sliding: int | None) -> SequenceState:
        """The sequence state of the device's plan, linked to that of the host."""
        sequences: SequenceState = self.low.sequences(layers, sliding)
        # With chunks the host's pages are not freed behind a sliding window: they would be freed for the whole forward at once,
        # and its earlier chunks still read them.
        sequences.mirror_on_host(HOST.sequences(layers, sliding if self.encoding_chunk is None else None))
        return sequences

    def open(self, keys: Tensor, values: Tensor, sequences: SequenceState, context: LayerContext) -> OffloadStore:
        """The empty store of this policy."""
        low = self.low.open(keys, values, sequences, context)
        assert isinstance(sequences.host_state, OrderedSequenceState)
        host = HOST.open(keys, values, sequences.host_state, context)
        return STORES[type(self.policy)](self, low, host, keys, values, sequences, context)

    @property
    def encoding_chunk(self) -> int | None:
        """As the policy says: tokens to fetch are chosen for each chunk."""
        return self.policy.chunk

    @property
    def in_order(self) -> bool:
        """As in the device's plan, like the properties that follow."""
        return self.low.in_order

    @property
    def observes(self) -> bool:
        return self.low.observes

    @property
    def relocates(self) -> bool:
        return self.low.relocates

    @property
    def before_rope(self) -> bool:
        return self.low.before_rope

    @property
    def by_forwards(self) -> bool:
        return self.low.by_forwards

    @property
    def differs_in_prompt(self) -> bool:
        return self.low.differs_in_prompt

    def codecs(self) -> list[Codec]:
        """The codecs of the device's plan; tokens on the host are exact."""
        return self.low.codecs()

    def pairs(self, context: LayerContext) -> list[Any]:
        """The tiers of the device's plan."""
        return self.low.pairs(context)

    def recoded(self, change: Recoding) -> "OffloadPlan":
        """The same plan with other codecs on the device."""
        return replace(self, low=self.low.recoded(change))

    def in_segments(self, first: Recoding, rest: Recoding) -> "OffloadPlan | None":
        """The same plan with chunks as segments on the device; None without chunks."""
        low = self.low.in_segments(first, rest)
        return None if low is None else replace(self, low=low)

    def tables(self) -> list[Tensor]:
        """The tables of the device's plan."""
        return self.low.tables()

    def to(self, device: torch.device) -> "OffloadPlan":
        """The same plan with copies of its tables on `device`."""
        return replace(self, low=self.low.to(device))
