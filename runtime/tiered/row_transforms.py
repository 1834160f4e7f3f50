"""The transforms of a layer's tiers, with parameters for every row: tiers may share one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from calib.kernels.magnitude import largest_magnitude
from calib.kernels.to_half import HALF_MAX
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.transform import Measured
from calib.runtime.tiered.forward_stats import ForwardStats
from calib.runtime.tiered.row_transform import RowTransform
from calib.runtime.tiered.tier_plan import TierPlan


class RowTransforms(dict[tuple[str, Any], RowTransform]):
    """Transforms by role and by the tier's number, or by what is measured where that is over whole chunks.

    Tiers with equal transforms measured over whole chunks share one. A tier of blocks shares that of the first chunk's tier, where
    both transforms are of the same class.
    """

    def __init__(self, tiers: Sequence[TierPlan], kinds: int, keys: Tensor, values: Tensor) -> None:
        """`keys`, `values [rows, kv_heads, n, head_dim]` are the first ones; tier `kinds + n` is the tier of blocks for tier n."""
        super().__init__()
        self._keys: dict[tuple[str, int], tuple[str, Any]] = {}
        for role, like in (("keys", keys), ("values", values)):
            stages = [dict(tier.streams())[role].transform for tier in tiers]
            for number, stage in enumerate(stages):
                key = self._keys[role, number] = role, _shared(stage, number, stages[number % kinds], number % kinds)
                if key not in self:
                    self[key] = RowTransform(stage, like, torch.float16)

    def of(self, role: str, number: int) -> RowTransform:
        """The transform of a tier."""
        return self[self._keys[role, number]]

    def measured_keys(self, role: str) -> list[Any]:
        """The keys, without the role, of the transforms of keys or of values that are measured."""
        return [key for (own, key), transform in self.items() if own == role and transform.measured is not None]

    def settle(self, extremes: dict[str, Tensor]) -> None:
        """Decides the width of parameters from the extremes of the first tokens, where given; called before any is measured."""
        for (role, _), transform in self.items():
            if role in extremes and bool(largest_magnitude(extremes[role]) > HALF_MAX):
                transform.widen()

    def measure(
        self,
        shown: ForwardStats,
        rows: list[int],
        role: str,
        tokens: Tensor,
        tier: int | None,
        order: Tensor | None = None,
    ) -> None:
        """Fits the measured transforms of keys or of values to `tokens [len(rows), kv_heads, n, D]`, or to those at
        `order [..., m]`: the transforms of one `tier`, or with None those over a whole chunk."""
        known = shown.extremes.get(role) if tier is None else None
        extremes = None if known is None else known.of_channels(tokens)
        for key in self.measured_keys(role):
            if (key if isinstance(key, int) else None) == tier:
                transform = self[role, key]
                assert transform.measured is not None
                queries = shown.queries_of(rows) if transform.measured.needs_queries else None
                transform.measure(rows, tokens, tokens if queries is None else queries, order, extremes)


def _shared(stage: Transform | Measured, number: int, of_first: Transform | Measured, first: int) -> Any:
    """What tiers have in common that share the transform of tier `number`."""
    if getattr(stage, "over", "tier") == "chunk":
        return stage
    return first if type(stage) is type(of_first) else number
