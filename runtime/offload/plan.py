"""What a method decides for a layer whose tokens are all on the host, and on the device as far as a policy says."""

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
    """`low` is what the device holds of every token, or of some; `policy` says which of the host's are fetched."""

    low: Plan
    policy: TopTokens | TopBlocks

    on_host = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", self.low.with_positions())  # a token is named by its position

    @property
    def needs_rope(self) -> str | None:
        """The device's part says whether attention must know the model's RoPE."""
        return self.low.needs_rope

    @property
    def needs_token_ids(self) -> bool:
        """As the device's part says."""
        return self.low.needs_token_ids

    @property
    def lacks_special_ids(self) -> bool:
        """As the device's part says."""
        return self.low.lacks_special_ids

    def with_special_ids(self, special_ids: tuple[int, ...]) -> "OffloadPlan":
        """The device's part with them."""
        return replace(self, low=self.low.with_special_ids(special_ids))

    @property
    def lacks_key_bias(self) -> bool:
        """As the device's part says."""
        return self.low.lacks_key_bias

    def with_key_bias(self, bias: Tensor) -> "OffloadPlan":
        """The device's part with it: what lies on the host is exact."""
        return replace(self, low=self.low.with_key_bias(bias))

    @property
    def speculative(self) -> bool:
        """Whether a decode step takes a speculative token along."""
        return self.policy.speculates

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for stages that do not fit a head of this width."""
        self.low.check(head_dim, dtype)

    def sequences(self, layers: int, sliding: int | None) -> SequenceState:
        """The state of the device's part, with that of the host."""
        sequences: SequenceState = self.low.sequences(layers, sliding)
        # The pages that a sliding window gives back are those behind a whole forward: an earlier chunk of it may still see them.
        sequences.mirror_on_host(HOST.sequences(layers, sliding if self.encoding_chunk is None else None))
        return sequences

    def open(self, keys: Tensor, values: Tensor, sequences: SequenceState, context: LayerContext) -> OffloadStore:
        """The store of this policy."""
        low = self.low.open(keys, values, sequences, context)
        assert isinstance(sequences.host_state, OrderedSequenceState)
        host = HOST.open(keys, values, sequences.host_state, context)
        return STORES[type(self.policy)](self, low, host, keys, values, sequences, context)

    @property
    def encoding_chunk(self) -> int | None:
        """As the policy says: what is fetched is chosen for each chunk."""
        return self.policy.chunk

    @property
    def in_order(self) -> bool:
        """As the device's part says; so are the following."""
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
        """Of the device's part: what the host holds is exact."""
        return self.low.codecs()

    def pairs(self, context: LayerContext) -> list[Any]:
        """The device's part's."""
        return self.low.pairs(context)

    def recoded(self, change: Recoding) -> "OffloadPlan":
        """The device's part with other codecs."""
        return replace(self, low=self.low.recoded(change))

    def in_segments(self, first: Recoding, rest: Recoding) -> "OffloadPlan | None":
        """The device's part with chunks as segments."""
        low = self.low.in_segments(first, rest)
        return None if low is None else replace(self, low=low)

    def tables(self) -> list[Tensor]:
        """Those of the device's part."""
        return self.low.tables()

    def to(self, device: torch.device) -> "OffloadPlan":
        """The same with tables of its own on `device`."""
        return replace(self, low=self.low.to(device))
