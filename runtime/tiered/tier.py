"""One tier of one layer: keys and values of the same tokens in the same slots, each stream in its own encoding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.runtime.pages import TIER_PAGE_TOKENS, TILE_TOKENS, PagePool, Pages, PageTable, tile_tokens, upload
from calib.runtime.stages.codec.corrected import FURTHER, Corrected, lists, segment_mix, segment_scores
from calib.runtime.stages.contract import Block, Codec, Field, Segment, Transform
from calib.runtime.stages.moved import moved, own_tensors
from calib.runtime.stages.transform import Measured, MeasuredBalancer, MeasuredRange, MeasuredScale
from calib.runtime.tiered.reading import Tile

POSITIONS = "positions"


@dataclass(frozen=True)
class TierStages:
    """How one stream of a tier is encoded; a measured transform is fitted to each row's first chunk."""

    transform: "Transform | Measured"
    codec: Codec


# What a segment is in a tier: nothing (tokens come in any numbers), a row's tokens, or a page's.
Segments = Literal["none", "row", "page"]


@dataclass(frozen=True)
class TierPlan:
    """A tier that is stored.

    `relocated` ones are met with a query at its place inside the cache (StreamingLLM). Where all of a row's tokens are one
    segment, what they share lies in the row's record; where a page's are, in the page, of `page_tokens`.
    """

    keys: TierStages
    values: TierStages
    relocated: bool = False
    segments: Segments = "none"
    page_tokens: int = TIER_PAGE_TOKENS

    def streams(self) -> tuple[tuple[str, TierStages], tuple[str, TierStages]]:
        """Both streams by name."""
        return ("keys", self.keys), ("values", self.values)

    def segment(self, heads: int, longest: int) -> Segment | None:
        """The size that fields are laid out for; a row's segment has `longest` tokens at most."""
        if self.segments == "none":
            return None
        return Segment(heads, longest if self.segments == "row" else self.page_tokens)


class RowTransform:
    """A transform, and where it is measured its numbers for every row: tensors `[rows, kv_heads, 1, head_dim]`."""

    def __init__(self, stage: Transform | Measured, like: Tensor, dtype: torch.dtype) -> None:
        """`like [rows, kv_heads, any, head_dim]`; measured numbers are kept in `dtype`."""
        self.dtype = dtype
        self.measured = stage if isinstance(stage, MeasuredRange | MeasuredScale | MeasuredBalancer) else None
        blank = like.new_empty(like.shape[0], like.shape[1], 1, like.shape[3], dtype=dtype)
        self.stage: Transform = stage.neutral(blank) if self.measured else stage  # type: ignore[union-attr,assignment]

    def of(self, rows: range | list[int]) -> Transform:
        """The transform of some rows."""
        if self.measured is None:
            return self.stage
        whole = len(rows) == len(own_tensors(self.stage)[0])
        if whole:
            return self.stage
        if isinstance(rows, range):
            return self._mapped(lambda tensor: tensor[rows.start : rows.stop])
        return self._mapped(lambda tensor: tensor[upload(rows, torch.int64, tensor.device)])

    def measure(self, rows: list[int], tokens: Tensor, query: Tensor) -> None:
        """Fits the transform of `rows` to their tokens and queries, `[len(rows), heads, n, head_dim]`."""
        assert self.measured is not None
        found = self.measured.measure(tokens, query, self.dtype)
        for own, new in zip(own_tensors(self.stage), own_tensors(found), strict=True):
            own[rows] = new

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        if self.measured is not None:
            self.stage = self._mapped(lambda tensor: tensor[sources.to(tensor.device)])

    def to(self, device: torch.device, stage: Transform | Measured) -> None:
        """Moves its numbers; where nothing is measured, `stage` is the plan's, already there."""
        self.stage = moved(self.stage, device) if self.measured else stage  # type: ignore[assignment]

    def bytes(self) -> int:
        """Of the rows' numbers, from shapes."""
        return sum(t.numel() * t.element_size() for t in own_tensors(self.stage)) if self.measured else 0

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Transform:
        names = {name: change(value) for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        return replace(self.stage, **names)  # type: ignore[type-var]


class Tier:
    """Pages of one tier. Fields of a page are those of both codecs, "keys.words" and so on, and perhaps positions.

    `records` holds what a row's segment shares, a page for each row. `further` counts outliers that found no slot.
    """

    def __init__(
        self, plan: TierPlan, transforms: dict[str, RowTransform], keys: Tensor, values: Tensor, positions: bool
    ) -> None:
        """The first keys and values `[rows, kv_heads, n, head_dim]` fix shapes and the width of parameters.

        `positions` keeps every token's place in its row, int32.
        """
        self.plan, self.transforms, self.positions = plan, transforms, positions
        self.relocated = plan.relocated
        self.widths, self.dtype = {"keys": keys.shape[3], "values": values.shape[3]}, keys.dtype
        self.wide: dict[str, bool] = {}
        for (role, stages), like in zip(plan.streams(), (keys, values), strict=True):
            self.wide[role] = stages.codec.wide(like) if like.shape[2] else False
        self.longest, heads, device = 0, keys.shape[1], keys.device
        self.pool = PagePool({}, heads, device, plan.page_tokens)
        self.records = PagePool({}, heads, device, 1) if plan.segments == "row" else None
        self.tile_tokens = tile_tokens(heads, keys.shape[3])
        self.further: Tensor | None = None
        if any(isinstance(stages.codec, Corrected) and stages.codec.counts_further for _, stages in plan.streams()):
            self.further = torch.zeros((), dtype=torch.int64, device=device)
        self._lay_out()

    def fit(self, tokens: int) -> None:
        """Room for a row's segment of so many tokens."""
        if self.records is not None and tokens > self.longest:
            self.longest = tokens
            self._lay_out()

    def _lay_out(self) -> None:
        segment = self.plan.segment(self.pool.kv_heads, self.longest)
        fields: dict[str, Field] = {}
        for role, stages in self.plan.streams():
            own = stages.codec.fields(self.widths[role], self.dtype, self.wide[role], segment)
            fields |= {f"{role}.{name}": field for name, field in own.items()}
        if self.positions:
            fields[POSITIONS] = Field(1, 1, torch.int32, POSITIONS)
        shared = {name: field for name, field in fields.items() if field.tokens_per_row is None}
        if self.records is not None:
            self.records.fit(shared)
            fields = {name: field for name, field in fields.items() if name not in shared}
        self.pool.fit(fields)

    def write(
        self,
        rows: list[int],
        table: PageTable,
        first: int,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        records: PageTable | None = None,
    ) -> None:
        """Encodes tokens into slots `first` ... of `rows`: `[len(rows), kv_heads, n, head_dim]`, places int64 `[..., n]`.

        Where a segment is a row's or a page's tokens, they are one. `records` is the table of the rows' records.
        """
        if self.records is not None and records is not None:  # row by row: a prompt's float32 copies are as long as it
            for i, row in enumerate(rows):
                own = slice(i, i + 1)
                block = self.encode([row], keys[own], values[own], places[own])
                self.write_block([row], table, first, block)
                self.records.write_run(records.rows[row], 0, {name: part[0] for name, part in block.items()})
            return
        piece = max(1, TILE_TOKENS // len(rows)) if self.plan.segments == "none" else keys.shape[2]
        for at in range(0, keys.shape[2], piece):
            part = slice(at, at + piece)
            block = self.encode(rows, keys[:, :, part], values[:, :, part], places[:, :, part])
            self.write_block(rows, table, first + at, block)

    def write_block(self, rows: list[int], table: PageTable, first: int, block: Block) -> None:
        """Puts an encoded block `[len(rows), kv_heads, n, width]` into slots `first` ... of `rows`."""
        for i, row in enumerate(rows):
            self.pool.write_run(table.rows[row], first, {name: part[i] for name, part in block.items()})

    def encode(self, rows: range | list[int], keys: Tensor, values: Tensor, places: Tensor) -> Block:
        """The fields of tokens of `rows`."""
        block: dict[str, Tensor] = {}
        for (role, stages), tokens in zip(self.plan.streams(), (keys, values), strict=True):
            own = dict(stages.codec.encode(self.transforms[role].of(rows).forward(tokens), self.wide[role]))
            further = own.pop(FURTHER, None)
            if further is not None and self.further is not None:
                self.further += further.sum()
            block |= {f"{role}.{name}": part for name, part in own.items()}
        if self.positions:
            block[POSITIONS] = places.to(torch.int32)[..., None]
        return block

    def decode(self, rows: range | list[int], block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, float32 `[len(rows), kv_heads, n, head_dim]`."""
        found = []
        for role, stages in self.plan.streams():
            own = {name.removeprefix(f"{role}."): part for name, part in block.items() if name.startswith(role)}
            found.append(self.transforms[role].of(rows).inverse(stages.codec.decode(own, self.widths[role])))
        return found[0], found[1]

    def places(self, pages: Pages) -> Tensor:
        """The positions of the tokens in `pages`: int64 `[rows, kv_heads, tokens]`."""
        return self.pool.read(pages, POSITIONS)[""].squeeze(2).long()

    def met(self, rows: range, query: Tensor, records: Pages | None, tokens: int) -> "MetTier":
        """The tier of `rows`, `tokens` slots of each, as `query [rows, kv_heads, query rows, head_dim]` meets it."""
        return MetTier(self, rows, query, records, tokens)


class MetTier:
    """A tier for the rows and queries of one forward: what is the same for all its tiles is worked out once."""

    def __init__(self, tier: Tier, rows: range, query: Tensor, records: Pages | None, tokens: int) -> None:
        self.tier, self.tokens = tier, tokens
        self.transforms = {role: tier.transforms[role].of(rows) for role in tier.transforms}
        self.codecs = {role: stages.codec for role, stages in tier.plan.streams()}
        self.query, self.constant = self.transforms["keys"].fold_query(query)
        self.shared: dict[str, Block] = {"keys": {}, "values": {}}
        self.bias: Tensor | None = None
        if tier.records is not None and records is not None:
            self.shared = {role: tier.records.read(records, f"{role}.") for role in self.shared}
            self.bias = segment_scores(self.codecs["keys"], self.query, self.shared["keys"], tokens)

    def scores(self, tile: Tile) -> Tensor:
        """Scores against the keys of a tile: `[rows, kv_heads, query rows, tokens]`."""
        codec, block = self.codecs["keys"], self._block("keys", tile)
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
        weights = F.pad(weights, (0, self.tokens - weights.shape[-1]))
        mixed = segment_mix(self.codecs["values"], weights, self.shared["values"], self.tier.widths["values"])
        assert mixed is not None
        return self.transforms["values"].fold_output(mixed, torch.zeros_like(weights))

    def _block(self, role: str, tile: Tile) -> Block:
        return {**self.tier.pool.read(tile.pages, f"{role}."), **self.shared[role]}
