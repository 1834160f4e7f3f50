"""A tier as the queries of one forward meet it: packed, its transform folded away, what its segments share beside it."""

from collections.abc import Callable

import torch
from torch import Tensor

from calib.runtime.pages import Pages
from calib.runtime.stages.codec.corrected import lists, segment_mix, segment_scores
from calib.runtime.stages.codec.sparse import tokens_first
from calib.runtime.stages.contract import Block
from calib.runtime.tiered.reading import Tile
from calib.runtime.tiered.tier import Tier

Turned = Callable[[Tensor, Tier, Tile], Tensor]


class MetTier:
    """A tier for the rows and queries of one forward: what is the same for all its tiles is worked out once."""

    def __init__(
        self, tier: Tier, rows: range, query: Tensor, records: Pages | None, tokens: int, turned: Turned | None = None
    ) -> None:
        """`turned` brings decoded keys to their places, where they are stored before RoPE."""
        self.tier, self.turned = tier, turned
        self.transforms = {role: tier.transforms[role].of(rows) for role in tier.transforms}
        self.codecs = {role: tier.codec(role, rows) for role in tier.transforms}
        self.query, self.constant = self.transforms["keys"].fold_query(query)
        self.shared: dict[str, Block] = {"keys": {}, "values": {}}
        self.bias: Tensor | None = None
        if tier.records is not None and records is not None:
            self.shared = {role: tier.records.read(records, f"{role}.") for role in self.shared}
            self.bias = segment_scores(self.codecs["keys"], self.query, self.shared["keys"], tokens)

    def scores(self, tile: Tile) -> Tensor:
        """Scores against the keys of a tile: `[rows, kv_heads, query rows, tokens]`."""
        codec, block = self.codecs["keys"], self._block("keys", tile)
        if self.turned is not None:
            keys = codec.decode(tokens_first(block), self.tier.widths["keys"])
            return self.query @ self.turned(keys, self.tier, tile).mT
        found = codec.scores(self.query, block)
        if self.bias is not None:
            found = found + self.bias[..., tile.start : tile.stop]
        elif self.tier.plan.segments == "page":
            listed = segment_scores(codec, self.query, block, found.shape[-1])
            found = found if listed is None else found + listed
        return found if self.constant is None else found + self.constant

    def mix(self, weights: Tensor, tile: Tile) -> Tensor:
        """Weighted sum of the values of a tile; what a row's record lists among them is left to `listed_mix`."""
        codec, block, width = self.codecs["values"], self._block("values", tile), self.tier.widths["values"]
        mixed = codec.mix(weights, block, width)
        if self.tier.plan.segments == "page":
            listed = segment_mix(codec, weights, block, width)
            mixed = mixed if listed is None else mixed + listed
        return self.transforms["values"].fold_output(mixed, weights)

    @property
    def lists_values(self) -> bool:
        """Whether `listed_mix` has anything to add."""
        return self.tier.records is not None and lists(self.codecs["values"])

    def listed_mix(self, weights: Tensor) -> Tensor:
        """What the values in the rows' records add, from the final `weights [..., slots]` of all tiles in order."""
        mixed = segment_mix(self.codecs["values"], weights, self.shared["values"], self.tier.widths["values"])
        assert mixed is not None
        return self.transforms["values"].fold_output(mixed, torch.zeros_like(weights))

    def _block(self, role: str, tile: Tile) -> Block:
        return {**self.tier.pool.read(tile.pages, f"{role}."), **self.shared[role]}
