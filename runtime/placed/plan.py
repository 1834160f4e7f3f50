"""What a method decides for a layer whose tokens are all on the host, and on the device as far as a policy says."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.ordered.rows import OrderedRows
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.placed.store import PlacedStore
from calib.runtime.placed.top_blocks import TopBlocksStore
from calib.runtime.placed.top_tokens import TopTokensStore
from calib.runtime.rows import Rows
from calib.runtime.stages.placement import TopBlocks, TopTokens
from calib.runtime.store import Place, Plan
from calib.runtime.tiered.plan import TieredPlan

STORES: dict[type[Any], type[PlacedStore]] = {TopTokens: TopTokensStore, TopBlocks: TopBlocksStore}

HOST = LayerPlan.exact(on_host=True)


@dataclass(frozen=True)
class PlacedPlan:
    """`low` is what the device holds of every token, or of some; `policy` says which of the host's are fetched."""

    low: Plan
    policy: TopTokens | TopBlocks

    def __post_init__(self) -> None:
        if isinstance(self.low, TieredPlan):  # a token is named by its place, which a slot of a single tier is
            object.__setattr__(self, "low", replace(self.low, positions=len(self.low.tiers) > 1))

    @property
    def rotation_remedy(self) -> str | None:
        """The device's part says whether attention must know the model's RoPE."""
        return self.low.rotation_remedy

    @property
    def asks_ids(self) -> bool:
        """As the device's part says."""
        return self.low.asks_ids

    @property
    def speculative(self) -> bool:
        """Whether a decode step takes a guess along."""
        return isinstance(self.policy, TopTokens) and self.policy.speculative and self.policy.k > 0

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for stages that do not fit a head of this width."""
        self.low.check(head_dim, dtype)

    def rows(self, layers: int, sliding: int | None) -> Rows:
        """The ledger of the device's part, which leads that of the host."""
        rows: Rows = self.low.rows(layers, sliding)
        rows.lead(HOST.rows(layers, sliding))
        return rows

    def open(self, keys: Tensor, values: Tensor, rows: Rows, place: Place) -> PlacedStore:
        """The store of this policy."""
        low = self.low.open(keys, values, rows, place)
        assert isinstance(rows.follower, OrderedRows)
        host = HOST.open(keys, values, rows.follower, place)
        return STORES[type(self.policy)](self, low, host, keys, values, rows, place)

    def tables(self) -> list[Tensor]:
        """Those of the device's part."""
        return self.low.tables()

    def to(self, device: torch.device) -> "PlacedPlan":
        """The same with tables of its own on `device`."""
        return replace(self, low=self.low.to(device))
