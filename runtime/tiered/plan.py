"""The plan of a layer whose tokens are stored in tiers."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.runtime.rotation import KEEP_ROTATED
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
    """Tiers, best first, and which tokens go to each.

    Args:
        tiers: the stored tiers; where `tiering` has one more, its tokens are evicted.
        tiering: how many tokens each tier holds, for any length.
        saliency: the scores that decide between tiers; None where the tiering needs no scores.
        probes: which queries are observed (`RatioTiers`), or which of a prompt's (`HeavyHitterBudget`).
        shared_across_heads: whether all KV heads of a layer share one set of salient tokens, by the sum of their mass.
        oracle_share: oracle eviction: the share of tokens that each query of a later forward attends, those with the highest
            logits.
        before_rope: keys are encoded as they were before RoPE, and rotated to their positions when attended (`RatioTiers` only).
        measured: number of positions over which the keys' statistics were measured; beyond it a warning is given. None: valid
            everywhere (`RatioTiers` only).
        positions: whether every token's position is recorded, even if neither the tiering nor a sliding window needs it.
        representatives: how many keys represent a block that has left the window (`InitialAndWindow` only).
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
        """Whether a tier's tokens are attended at their positions in the cache instead of those in the text."""
        return any(tier.relocated for tier in self.tiers)

    @property
    def needs_rope(self) -> str | None:
        """The advice to give where the model's RoPE is not supported; None where RoPE need not be known."""
        if self.before_rope:
            return KEEP_ROTATED
        return "use positions='original'" if self.relocates else None

    @property
    def needs_token_ids(self) -> bool:
        """Whether probes or policies depend on token ids."""
        special = isinstance(self.saliency, FastGen) and bool(self.saliency.special_ids)
        return special or (self.probes is not None and self.probes.strategy == "special")

    @property
    def lacks_special_ids(self) -> bool:
        """Whether probes are special tokens whose ids are not set yet."""
        return self.probes is not None and self.probes.lacks_ids

    def with_special_ids(self, special_ids: tuple[int, ...]) -> "TieredPlan":
        """The same plan with these ids as special tokens of its probes."""
        return self if self.probes is None else replace(self, probes=self.probes.with_ids(special_ids))

    @property
    def evicts(self) -> bool:
        """Whether tokens are evicted by the tiering, or hidden by the oracle."""
        return self.oracle_share is not None or self.tiering.evicts(self.kinds)

    @property
    def observes(self) -> bool:
        """Whether attention is observed, for saliency or to choose representatives."""
        return self.saliency is not None or self.representatives > 0

    @property
    def joins_heads(self) -> bool:
        """Whether a codec joins heads, or all heads keep one set of tokens."""
        return self.shared_across_heads or super().joins_heads

    @property
    def looked_at(self) -> Hashable:
        """A key of everything by which attention decides: plans with equal keys observe the same for the same tokens."""
        budget = self.tiering if self.saliency is not None and self.saliency.by_budget else None
        return self.saliency, self.probes, self.tiering.shortest_chunk, budget

    @property
    def by_forwards(self) -> bool:
        """Whether the split into forwards matters: attention decides, tokens are in chunks, or atoms are sampled from the
        prompt."""
        sampled = any(codec.sampling is not None for codec in self.codecs())
        return self.observes or sampled or self.tiering.by_forwards

    @property
    def differs_in_prompt(self) -> bool:
        """Whether a prompt takes other room: the prompt fixes the budget, or is a segment."""
        return self.tiering.fixed_by_prompt or any(tier.segments != "none" for tier in self.tiers)

    def with_positions(self) -> "TieredPlan":
        """The same plan, with every token's position recorded where it does not follow from the slot."""
        return replace(self, positions=True)

    def codecs(self) -> list[Codec]:
        """The codecs of all tiers, keys before values."""
        return [stages.codec for tier in self.tiers for _, stages in tier.streams()]

    def pairs(self, context: LayerContext) -> list[TierPlan]:
        """All tiers, with random stages seeded for this layer."""
        return list(self.with_seed(context).tiers)

    def recoded(self, change: Recoding) -> "TieredPlan":
        """The same plan with other codecs in every tier."""
        return replace(self, tiers=tuple(tier.recoded(change) for tier in self.tiers))

    def in_segments(self, first: Recoding, rest: Recoding) -> "TieredPlan | None":
        """The same plan with tiers for the first chunk, one segment per row, and others for the blocks, one page per block;
        None without chunks."""
        if self.tiering.shortest_chunk is None:
            return None
        of_first, of_blocks = self.tiers[: self.kinds], self.tiers[-self.kinds :]
        of_row = tuple(replace(tier.recoded(first), segments="row") for tier in of_first)
        return replace(self, tiers=of_row).with_blocks([tier.recoded(rest) for tier in of_blocks])

    def with_blocks(self, tiers: Sequence[TierPlan]) -> "TieredPlan":
        """The same plan with `tiers` added for the blocks after the first chunk, one page per block and tier."""
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
        """How many tiers differ in importance. Where segments share parameters, each is there twice: for the prompt and for
        blocks."""
        return len(self.tiers) // 2 if any(tier.segments != "none" for tier in self.tiers) else len(self.tiers)

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for groups that do not divide the head or have more tokens than are encoded together; for a
        saliency of the newest queries where probes score chunks; for one that uses neighbours where tokens are in any order;
        and for special probes without their ids."""
        if self.lacks_special_ids:
            raise ValueError(
                "probes='special' with special_ids=[]: give the ids, or the tokenizer that knows them: "
                "compress(..., tokenizer=tokenizer)"
            )
        if self.saliency is not None and self.saliency.by_neighbours and not self.tiering.scores_in_order:
            raise ValueError(
                f"saliency: {type(self.saliency).__name__} needs tokens in their order, and {type(self.tiering).__name__} scores "
                "them in any order; use it with PromptBudget, or Accumulated here"
            )
        if self.saliency is not None and self.saliency.newest is not None and self.tiering.shortest_chunk is not None:
            raise ValueError(
                f"saliency: {type(self.saliency).__name__} scores by the newest query alone, and chunks are scored by probes; use "
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
        """The sequence state: a page table for each tier, and one for the rows' shared parameters where there are any."""
        row_params = any(tier.segments == "row" for tier in self.tiers)
        return TieredSequenceState(self.tiering, [tier.page_tokens for tier in self.tiers], layers, sliding, row_params)

    def open(self, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext) -> TieredStore:
        """The store class of this tiering, opened with the first keys and values."""
        return STORES[type(self.tiering)](self.to(keys.device).with_seed(context), keys, values, sequences, context)

    def with_seed(self, context: LayerContext) -> "TieredPlan":
        """The same plan, with random stages seeded by the cache's seed and the layer."""

        def there(stages: TierStages) -> TierStages:
            return replace(stages, codec=stages.codec.with_seed(context.seed, context.layer))

        return self._mapped(there)

    def tables(self) -> list[Tensor]:
        """The tensors of every stage."""
        parts = [part for tier in self.tiers for _, own in tier.streams() for part in (own.transform, own.codec)]
        return [table for part in (*parts, *self._predictions()) for table in tensors_of(part)]

    def _predictions(self) -> list[Prediction]:
        return [tier.prediction for tier in self.tiers if tier.prediction is not None]

    def to(self, device: torch.device) -> "TieredPlan":
        """The same plan with copies of its tables on `device`."""

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
