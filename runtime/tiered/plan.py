"""What a method decides for a layer whose tokens are stored by importance."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.stages.contract import Saliency, Tiering
from calib.runtime.stages.moved import moved, own_tensors
from calib.runtime.stages.saliency import Probes
from calib.runtime.stages.tiering import HeavyRecent, Shares, Sinks
from calib.runtime.store import Place
from calib.runtime.tiered.budget import BudgetStore
from calib.runtime.tiered.chunks import ChunkStore
from calib.runtime.tiered.rows import TieredRows
from calib.runtime.tiered.sinks import SinkStore
from calib.runtime.tiered.store import TieredStore
from calib.runtime.tiered.tier import TierPlan, TierStages

STORES: dict[type[Any], type[TieredStore]] = {Shares: ChunkStore, HeavyRecent: BudgetStore, Sinks: SinkStore}


@dataclass(frozen=True)
class TieredPlan:
    """Tiers best first, and how tokens come to them.

    Args:
        tiers: the stored ones; where `tiering` names one more, its tokens are evicted.
        tiering: counts of every tier at any length.
        saliency: what decides between tiers; None where the tiering needs no scores.
        probes: which query rows are looked at (`Shares` alone).
        one_set: whether all KV heads of a layer share one set of salient tokens, by the sum of their mass.
        kept: oracle eviction: the share of tokens that a query of a later forward attends to, the heaviest ones.
    """

    tiers: tuple[TierPlan, ...]
    tiering: Tiering
    saliency: Saliency | None = None
    probes: Probes | None = None
    one_set: bool = False
    kept: float | None = None

    @property
    def relocates(self) -> bool:
        """Whether a tier is met at its place in the cache, which needs the model's RoPE."""
        return any(tier.relocated for tier in self.tiers)

    @property
    def asks_ids(self) -> bool:
        """Whether probes are chosen by token id."""
        return self.probes is not None and self.probes.strategy == "special"

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for groups that do not divide the head, or hold several tokens."""
        for tier in self.tiers:
            for role, stages in tier.streams():
                stages.codec.fields(head_dim, dtype, False)
                if stages.codec.token_group() != 1:
                    raise ValueError(
                        f"{role}: a tier's tokens are encoded one by one, got a group of {stages.codec.token_group()} tokens; use 1"
                    )

    def rows(self, layers: int, sliding: int | None) -> TieredRows:
        """A table of pages for each tier."""
        return TieredRows(self.tiering, len(self.tiers), layers, sliding)

    def open(self, keys: Tensor, values: Tensor, rows: TieredRows, place: Place) -> TieredStore:
        """The store of this tiering."""
        return STORES[type(self.tiering)](self.to(keys.device), keys, values, rows, place)

    def tables(self) -> list[Tensor]:
        """Tensors of every stage."""
        stages = [stage for tier in self.tiers for _, stage in tier.streams()]
        return [table for stage in stages for part in (stage.transform, stage.codec) for table in own_tensors(part)]

    def to(self, device: torch.device) -> "TieredPlan":
        """The same with tables of its own on `device`."""

        def there(stages: TierStages) -> TierStages:
            return TierStages(moved(stages.transform, device), moved(stages.codec, device))

        tiers = (replace(tier, keys=there(tier.keys), values=there(tier.values)) for tier in self.tiers)
        return replace(self, tiers=tuple(tiers))
