"""What a method decides for a layer whose tokens are stored by importance."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.stages.codec import Corrected
from calib.runtime.stages.contract import Saliency, Tiering
from calib.runtime.stages.moved import moved, own_tensors
from calib.runtime.stages.saliency import Probes
from calib.runtime.stages.tiering import HeavyRecent, Local, Shares, Sinks
from calib.runtime.store import Place
from calib.runtime.tiered.budget import BudgetStore
from calib.runtime.tiered.chunks import ChunkStore
from calib.runtime.tiered.local import LocalStore
from calib.runtime.tiered.rows import TieredRows
from calib.runtime.tiered.sinks import SinkStore
from calib.runtime.tiered.store import TieredStore
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

STORES: dict[type[Any], type[TieredStore]] = {
    Shares: ChunkStore,
    HeavyRecent: BudgetStore,
    Sinks: SinkStore,
    Local: LocalStore,
}


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
        before_rope: keys are encoded as they were before RoPE, and turned to their places when attended (`Shares` alone).
        measured: places at which what keys are coded by was measured; None: it holds at all (`Shares` alone).
        positions: every token's place in its row is kept, though neither the tiering nor a sliding window needs it.
        representatives: keys that stand for a block that has left (`Local` alone).
    """

    tiers: tuple[TierPlan, ...]
    tiering: Tiering
    saliency: Saliency | None = None
    probes: Probes | None = None
    one_set: bool = False
    kept: float | None = None
    before_rope: bool = False
    measured: int | None = None
    positions: bool = False
    representatives: int = 0
    speculative = False

    @property
    def relocates(self) -> bool:
        """Whether a tier is met at its place in the cache."""
        return any(tier.relocated for tier in self.tiers)

    @property
    def rotation_remedy(self) -> str | None:
        """What to do where the model's RoPE is not one that can be followed; None where it need not be known."""
        if self.before_rope:
            return "use a method that keeps keys after RoPE, such as 'kivi'"
        return "use positions='original'" if self.relocates else None

    @property
    def asks_ids(self) -> bool:
        """Whether probes are chosen by token id."""
        return self.probes is not None and self.probes.strategy == "special"

    @property
    def kinds(self) -> int:
        """Tiers that differ in importance; where segments share numbers, each is there twice."""
        return len(self.tiers) // 2 if any(tier.segments != "none" for tier in self.tiers) else len(self.tiers)

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for groups that do not divide the head, or hold more tokens than are encoded together."""
        for tier in self.tiers:
            for role, stages in tier.streams():
                group = stages.codec.token_group()
                stages.codec.fields(head_dim, dtype, False, tier.segment(1, group))
                if group == 1:
                    continue
                if tier.segments == "none" or self.saliency is not None:
                    raise ValueError(
                        f"{role}: a tier's tokens are encoded one by one, got a group of {group} tokens; use 1"
                    )
                if tier.page_tokens % group:
                    raise ValueError(
                        f"{role}: a group of {group} tokens does not divide a page; use a divisor of {tier.page_tokens}"
                    )

    def rows(self, layers: int, sliding: int | None) -> TieredRows:
        """A table of pages for each tier, and one of records where rows have any."""
        records = any(tier.segments == "row" for tier in self.tiers)
        return TieredRows(self.tiering, [tier.page_tokens for tier in self.tiers], layers, sliding, records)

    def open(self, keys: Tensor, values: Tensor, rows: TieredRows, place: Place) -> TieredStore:
        """The store of this tiering."""
        return STORES[type(self.tiering)](self.to(keys.device).placed(place), keys, values, rows, place)

    def placed(self, place: Place) -> "TieredPlan":
        """The same, what draws drawing as this layer does."""

        def there(stages: TierStages) -> TierStages:
            codec = stages.codec
            return replace(
                stages, codec=codec.placed(place.seed, place.layer) if isinstance(codec, Corrected) else codec
            )

        return self._mapped(there)

    def tables(self) -> list[Tensor]:
        """Tensors of every stage."""
        stages = [stage for tier in self.tiers for _, stage in tier.streams()]
        return [table for stage in stages for part in (stage.transform, stage.codec) for table in own_tensors(part)]

    def to(self, device: torch.device) -> "TieredPlan":
        """The same with tables of its own on `device`."""

        def there(stages: TierStages) -> TierStages:
            return TierStages(moved(stages.transform, device), moved(stages.codec, device))

        return self._mapped(there)

    def _mapped(self, change: Callable[[TierStages], TierStages]) -> "TieredPlan":
        tiers = (replace(tier, keys=change(tier.keys), values=change(tier.values)) for tier in self.tiers)
        return replace(self, tiers=tuple(tiers))
