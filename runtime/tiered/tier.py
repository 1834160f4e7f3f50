"""One tier of one layer: keys and values of the same tokens in the same slots, each stream in its own encoding."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.runtime.pages import TIER_PAGE_TOKENS, TILE_TOKENS, PagePool, Pages, PageTable, tile_tokens, upload
from calib.runtime.stages.contract import Block, Codec, Field, Transform
from calib.runtime.stages.moved import moved, own_tensors
from calib.runtime.stages.transform import Measured, MeasuredBalancer, MeasuredRange, MeasuredScale

POSITIONS = "positions"


@dataclass(frozen=True)
class TierStages:
    """How one stream of a tier is encoded; a measured transform is fitted to each row's first chunk."""

    transform: "Transform | Measured"
    codec: Codec


@dataclass(frozen=True)
class TierPlan:
    """A tier that is stored; `relocated` ones are met with a query at its place inside the cache (StreamingLLM)."""

    keys: TierStages
    values: TierStages
    relocated: bool = False

    def streams(self) -> tuple[tuple[str, TierStages], tuple[str, TierStages]]:
        """Both streams by name."""
        return ("keys", self.keys), ("values", self.values)


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
    """Pages of one tier. Fields of a page are those of both codecs, "keys.words" and so on, and perhaps positions."""

    def __init__(
        self, plan: TierPlan, transforms: dict[str, RowTransform], keys: Tensor, values: Tensor, positions: bool
    ) -> None:
        """The first keys and values `[rows, kv_heads, n, head_dim]` fix shapes and the width of parameters.

        `positions` keeps every token's place in its row, int32.
        """
        self.plan, self.transforms = plan, transforms
        self.relocated = plan.relocated
        self.widths = {"keys": keys.shape[3], "values": values.shape[3]}
        self.wide: dict[str, bool] = {}
        fields: dict[str, Field] = {}
        for (role, stages), like in zip(plan.streams(), (keys, values), strict=True):
            self.wide[role] = stages.codec.wide(like) if like.shape[2] else False
            own = stages.codec.fields(like.shape[3], like.dtype, self.wide[role])
            fields |= {f"{role}.{name}": field for name, field in own.items()}
        self.positions = positions
        if positions:
            fields[POSITIONS] = Field(1, 1, torch.int32, POSITIONS)
        self.pool = PagePool(fields, keys.shape[1], keys.device, TIER_PAGE_TOKENS)
        self.tile_tokens = tile_tokens(keys.shape[1], keys.shape[3])

    def write(
        self, rows: list[int], table: PageTable, first: int, keys: Tensor, values: Tensor, places: Tensor
    ) -> None:
        """Encodes tokens into slots `first` ... of `rows`: `[len(rows), kv_heads, n, head_dim]`, places int64 `[..., n]`."""
        piece = max(1, TILE_TOKENS // len(rows))
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
            own = stages.codec.encode(self.transforms[role].of(rows).forward(tokens), self.wide[role])
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

    def scorer(self, rows: range, query: Tensor) -> Callable[[Pages], Tensor]:
        """Scores of `query [rows, kv_heads, query rows, head_dim]` against the keys in pages."""
        codec = self.plan.keys.codec
        folded, constant = self.transforms["keys"].of(rows).fold_query(query)

        def scores(pages: Pages) -> Tensor:
            found = codec.scores(folded, self.pool.read(pages, "keys."))
            return found if constant is None else found + constant

        return scores

    def mix(self, rows: range, weights: Tensor, pages: Pages) -> Tensor:
        """Weighted sum of the values in pages."""
        mixed = self.plan.values.codec.mix(weights, self.pool.read(pages, "values."), self.widths["values"])
        return self.transforms["values"].of(rows).fold_output(mixed, weights)
