"""What a method decides for a layer whose tokens are stored by importance."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.stages.contract import Codec
from calib.runtime.stages.prediction import Prediction
from calib.runtime.stages.saliency import FastGen, Probes
from calib.runtime.stages.selection import Saliency, Tiering
from calib.runtime.stages.tiering import HeavyHitterBudget, InitialAndWindow, PromptBudget, RatioTiers, Sinks
from calib.runtime.stages.to_device import tensors_of, to_device
from calib.runtime.store import LayerContext, Plan, Recoding
from calib.runtime.tiered.budget import BudgetStore
from calib.runtime.tiered.chunks import ChunkStore
from calib.runtime.tiered.local import LocalStore
from calib.runtime.tiered.prompt_budget import PromptBudgetStore
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.sinks import SinkStore
from calib.runtime.tiered.store import TieredStore
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

STORES: dict[type[Any], type[TieredStore]] = {
    RatioTiers: ChunkStore,
    HeavyHitterBudget: BudgetStore,
    PromptBudget: PromptBudgetStore,
    Sinks: SinkStore,
    InitialAndWindow: LocalStore,
}


@dataclass(frozen=True)
class TieredPlan(Plan):
    """Tiers best first, and how tokens come to them.

    Args:
        tiers: the stored ones; where `tiering` names one more, its tokens are evicted.
        tiering: counts of every tier at any length.
        saliency: what decides between tiers; None where the tiering needs no scores.
        probes: which query rows are observed (`RatioTiers`); of a prompt (`HeavyHitterBudget`).
        shared_across_heads: whether all KV heads of a layer share one set of salient tokens, by the sum of their mass.
        oracle_share: oracle eviction: the share of tokens that a query of a later forward attends to, the heaviest ones.
        before_rope: keys are encoded as they were before RoPE, and rotated to their positions when attended (`RatioTiers` alone).
        measured: positions at which what keys are coded by was measured; None: it holds at all (`RatioTiers` alone).
        positions: every token's position in its row is kept, though neither the tiering nor a sliding window needs it.
        representatives: keys that stand for a block that has left (`InitialAndWindow` alone).
    """

    tiers: tuple[TierPlan, ...]
    tiering: Tiering
    saliency: Saliency | None = None
    probes: Probes | None = None
    shared_across_heads: bool = False
    oracle_share: float | None = None
    before_rope: bool = False
    measured: int | None = None
    positions: bool = False
    representatives: int = 0

    @property
    def relocates(self) -> bool:
        """Whether a tier is met at its position in the cache."""
        return any(tier.relocated for tier in self.tiers)

    @property
    def needs_rope(self) -> str | None:
        """What to do where the model's RoPE is not one that can be followed; None where it need not be known."""
        if self.before_rope:
            return "use a method that keeps keys after RoPE, such as 'kivi'"
        return "use positions='original'" if self.relocates else None

    @property
    def needs_token_ids(self) -> bool:
        """Whether probes are chosen by token id, or policies go by them."""
        special = isinstance(self.saliency, FastGen) and bool(self.saliency.special_ids)
        return special or (self.probes is not None and self.probes.strategy == "special")

    @property
    def lacks_special_ids(self) -> bool:
        """Whether probes are special tokens, and nobody has said which those are."""
        return self.probes is not None and self.probes.lacks_ids

    def with_special_ids(self, special_ids: tuple[int, ...]) -> "TieredPlan":
        """The same with probes that know them."""
        return self if self.probes is None else replace(self, probes=self.probes.with_ids(special_ids))

    @property
    def evicts(self) -> bool:
        """By its tiering, or as the oracle does."""
        return self.oracle_share is not None or self.tiering.evicts(self.kinds)

    @property
    def observes(self) -> bool:
        """For saliency, or to choose representatives."""
        return self.saliency is not None or self.representatives > 0

    @property
    def joins_heads(self) -> bool:
        """By a codec, or because all heads keep one set."""
        return self.shared_across_heads or super().joins_heads

    @property
    def looked_at(self) -> Hashable:
        """What of the attention decides: plans of the same are shown the same of the same tokens."""
        budget = self.tiering if self.saliency is not None and self.saliency.by_budget else None
        return self.saliency, self.probes, self.tiering.shortest_chunk, budget

    @property
    def by_forwards(self) -> bool:
        """Attention decides, tokens come in chunks, or atoms are sampled from the prompt."""
        sampled = any(codec.sampling is not None for codec in self.codecs())
        return self.observes or sampled or self.tiering.by_forwards

    @property
    def differs_in_prompt(self) -> bool:
        """A budget that the prompt fixes, or segments, of which a prompt is one."""
        return self.tiering.fixed_by_prompt or any(tier.segments != "none" for tier in self.tiers)

    def with_positions(self) -> "TieredPlan":
        """Every token's position in its row kept, where no order tells it."""
        return replace(self, positions=True)

    def codecs(self) -> list[Codec]:
        """Of every tier, keys before values."""
        return [stages.codec for tier in self.tiers for _, stages in tier.streams()]

    def pairs(self, context: LayerContext) -> list[TierPlan]:
        """Every tier."""
        return list(self.with_seed(context).tiers)

    def recoded(self, change: Recoding) -> "TieredPlan":
        """Every tier with other codecs."""
        return replace(self, tiers=tuple(tier.recoded(change) for tier in self.tiers))

    def in_segments(self, first: Recoding, rest: Recoding) -> "TieredPlan | None":
        """Tiers for the first chunk, a segment for each row, and others for the blocks, a page each."""
        if self.tiering.shortest_chunk is None:
            return None
        of_first, of_blocks = self.tiers[: self.kinds], self.tiers[-self.kinds :]
        of_row = tuple(replace(tier.recoded(first), segments="row") for tier in of_first)
        return replace(self, tiers=of_row).with_blocks([tier.recoded(rest) for tier in of_blocks])

    def with_blocks(self, tiers: Sequence[TierPlan]) -> "TieredPlan":
        """Also these tiers, for the blocks behind the first chunk, a page for each block."""
        found = self.tiering.in_segments(len(tiers))
        assert found is not None, "there are no blocks"
        tiering, counts = found
        of_blocks = [
            # A tier that gets no tokens of a block still needs a page size.
            replace(tier, segments="page", page_tokens=max(1, count))
            for tier, count in zip(tiers, counts, strict=False)
        ]
        return replace(self, tiers=(*self.tiers, *of_blocks), tiering=tiering)

    @property
    def kinds(self) -> int:
        """Tiers that differ in importance; where segments share numbers, each is there twice."""
        return len(self.tiers) // 2 if any(tier.segments != "none" for tier in self.tiers) else len(self.tiers)

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for groups that do not divide the head, or hold more tokens than are encoded together, for a
        saliency of the newest queries where chunks are scored by probes, for one that goes by neighbours where tokens lie in
        any order, and for special probes without their ids."""
        if self.lacks_special_ids:
            raise ValueError(
                "probes='special' with special_ids=[]: give the ids, or the tokenizer that knows them: "
                "compress(..., tokenizer=tokenizer)"
            )
        if self.saliency is not None and self.saliency.by_neighbours and not self.tiering.scores_in_order:
            raise ValueError(
                f"saliency: {type(self.saliency).__name__} needs tokens in their order, and {type(self.tiering).__name__} scores "
                "them in any; use it with PromptBudget, or Accumulated here"
            )
        if self.saliency is not None and self.saliency.newest is not None and self.tiering.shortest_chunk is not None:
            raise ValueError(
                f"saliency: {type(self.saliency).__name__} looks at the newest query alone, and chunks are scored by probes; use "
                "it with a budget, or Normalised here"
            )
        for tier in self.tiers:
            for role, stages in tier.streams():
                group = stages.codec.token_group()
                stages.codec.fields(head_dim, dtype, False, tier.segment(1, group))
                if group == 1:
                    continue
                one_by_one = tier.segments == "none" and self.tiering.multiple % group
                if one_by_one or self.saliency is not None:
                    raise ValueError(
                        f"{role}: a tier's tokens are encoded one by one, got a group of {group} tokens; use 1"
                    )
                if tier.page_tokens % group:
                    raise ValueError(
                        f"{role}: a group of {group} tokens does not divide a page; use a divisor of {tier.page_tokens}"
                    )

    def sequences(self, layers: int, sliding: int | None) -> TieredSequenceState:
        """A table of pages for each tier, and one of the parameters that a row's segment shares, where there are any."""
        row_params = any(tier.segments == "row" for tier in self.tiers)
        return TieredSequenceState(self.tiering, [tier.page_tokens for tier in self.tiers], layers, sliding, row_params)

    def open(self, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext) -> TieredStore:
        """The store of this tiering."""
        return STORES[type(self.tiering)](self.to(keys.device).with_seed(context), keys, values, sequences, context)

    def with_seed(self, context: LayerContext) -> "TieredPlan":
        """The same, what draws drawing as this layer does."""

        def there(stages: TierStages) -> TierStages:
            return replace(stages, codec=stages.codec.with_seed(context.seed, context.layer))

        return self._mapped(there)

    def tables(self) -> list[Tensor]:
        """Tensors of every stage."""
        parts = [part for tier in self.tiers for _, own in tier.streams() for part in (own.transform, own.codec)]
        return [table for part in (*parts, *self._predictions()) for table in tensors_of(part)]

    def _predictions(self) -> list[Prediction]:
        return [tier.prediction for tier in self.tiers if tier.prediction is not None]

    def to(self, device: torch.device) -> "TieredPlan":
        """The same with tables of its own on `device`."""

        def there(stages: TierStages) -> TierStages:
            return TierStages(to_device(stages.transform, device), to_device(stages.codec, device))

        moved = self._mapped(there)
        tiers = (
            tier if tier.prediction is None else replace(tier, prediction=to_device(tier.prediction, device))
            for tier in moved.tiers
        )
        return replace(moved, tiers=tuple(tiers))

    def _mapped(self, change: Callable[[TierStages], TierStages]) -> "TieredPlan":
        tiers = (replace(tier, keys=change(tier.keys), values=change(tier.values)) for tier in self.tiers)
        return replace(self, tiers=tuple(tiers))
