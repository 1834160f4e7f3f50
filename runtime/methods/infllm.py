"""InfLLM (Xiao et al., 2024, arXiv:2402.04617): a local window, and earlier blocks fetched for the query."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, Method, check_choice
from calib.runtime.offload.plan import OffloadPlan
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.placement import TopBlocks
from calib.runtime.stages.tiering import InitialAndWindow
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class InfLLM(Method):
    """Exact keys and values, all of them in host memory; nothing is quantised.

    1. With `prefill="blocks"` the tokens of a forward are encoded `chunk` by `chunk` (section 3.1): each chunk attends to the
       initial tokens, the local ones, the blocks fetched for it and, causally, itself, and is stored before the next one. A
       row's chunks begin with its first token of the forward. With "exact" all tokens of a forward are one chunk, and attention
       over a prompt is exact.
    2. On the device: the first `initial` tokens and the newest `window` (up to `block` - 1 more, until a block is complete).
    3. The tokens between leave the device in blocks. A block is represented by the keys of the tokens that got the most attention,
       on the average, from the `window` queries after them.
    4. For a chunk and KV head those blocks are fetched that have the largest sum of products query x representative, over the
       chunk's queries and the block's representatives, averaged over the query heads. A decode step is a chunk.
    5. With `positions="cache"` all fetched tokens are attended at the position just before the local window, and the initial ones
       before that: no distance is longer than `initial` + `window` + `block` + `chunk` - 1, however long the row is. The model must
       have been trained on that many positions.

    Args:
        initial: first tokens kept on the device.
        window: local tokens kept on the device.
        block: tokens that leave the device together.
        representatives: keys that represent a block.
        fetched: blocks fetched for a chunk; with 0 it is StreamingLLM that drops whole blocks.
        positions: "cache" (step 5), or "original" for models whose RoPE cannot be rotated.
        prefill: "blocks" as published, so that a prompt may be longer than the trained context; "exact" attends a prompt as the
            model itself does.
        chunk: tokens that are encoded together with `prefill="blocks"`.
    """

    name: ClassVar[str] = "infllm"

    initial: int = 128
    window: int = 4096
    block: int = 128
    representatives: int = 4
    fetched: int = 16
    positions: Literal["cache", "original"] = "cache"
    prefill: Literal["blocks", "exact"] = "blocks"
    chunk: int = 512

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, ("cache", "original"))
        check_choice("prefill", self.prefill, ("blocks", "exact"))
        InitialAndWindow(self.initial, self.window, self.block)
        TopBlocks(self.block, self.representatives, self.fetched, self.chunk)

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> OffloadPlan:
        """Initial and local tokens on the device, everything on the host."""
        stages = TierStages(Identity(), Exact())
        initial = TierPlan(stages, stages, relocated=self.positions == "cache")
        tiering = InitialAndWindow(self.initial, self.window, self.block)
        low = TieredPlan((initial,), tiering, representatives=self.representatives)
        chunk = self.chunk if self.prefill == "blocks" else None
        return OffloadPlan(low, TopBlocks(self.block, self.representatives, self.fetched, chunk))
