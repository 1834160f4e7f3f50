"""One tier of one layer: keys and values of the same tokens in the same slots, each stream in its own encoding."""

import torch
from torch import Tensor

from calib.runtime.pages import TILE_TOKENS, Pages, PageTable, tile_tokens
from calib.runtime.pool import PagePool
from calib.runtime.stages.codec.corrected import counted, counter
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.contract import Block, Codec, Field
from calib.runtime.stages.transform import coded_width
from calib.runtime.state import State, branch, part_of, tensor_like, whole
from calib.runtime.tiered.row_dictionary import RowDictionary, bound, sparse_part
from calib.runtime.tiered.row_transform import RowTransform
from calib.runtime.tiered.tier_plan import TierPlan

POSITIONS = "positions"


class Tier:
    """Pages of one tier. Fields of a page are those of both codecs, "keys.words" and so on, and perhaps positions.

    Where a row's tokens lie in their order, slot s holds the token at place `first` + s; None: in any order.
    `records` holds what a row's segment shares, a page for each row. `further` counts outliers that found no slot.
    """

    def __init__(
        self,
        plan: TierPlan,
        transforms: dict[str, RowTransform],
        keys: Tensor,
        values: Tensor,
        positions: bool,
        dictionaries: dict[str, RowDictionary],
        first: int | None = None,
    ) -> None:
        """The first keys and values `[rows, kv_heads, n, head_dim]` fix shapes and the width of parameters.

        `positions` keeps every token's place in its row, int32, where no order tells it. `dictionaries` are the rows' own atoms,
        where a stream has any.
        """
        self.plan, self.transforms, self.dictionaries = plan, transforms, dictionaries
        self.positions, self.first = positions and first is None, first
        self.relocated = plan.relocated
        self.widths, self.dtype = {"keys": keys.shape[3], "values": values.shape[3]}, keys.dtype
        # What codecs see: components of a basis may be fewer than channels.
        self.coded = {role: coded_width(stages.transform, self.widths[role]) for role, stages in plan.streams()}
        self.wide: dict[str, bool] = {}
        for (role, stages), like in zip(plan.streams(), (keys, values), strict=True):
            self.wide[role] = stages.codec.wide(like) if like.shape[2] else False
        self.longest, heads, device = 0, keys.shape[1], keys.device
        self.pool = PagePool({}, heads, device, plan.page_tokens)
        self.records = PagePool({}, heads, device, 1) if plan.segments == "row" else None
        self.tile_tokens = tile_tokens(heads, max(keys.shape[3], *self.coded.values()))
        # The same for both streams: either counts or neither.
        self.further = counter(plan.keys.codec, device)
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
            own = stages.codec.fields(self.coded[role], self.dtype, self.wide[role], segment)
            fields |= {f"{role}.{name}": field for name, field in own.items()}
        if self.positions:
            fields[POSITIONS] = Field(1, 1, torch.int32, POSITIONS)
        shared = {name: field for name, field in fields.items() if field.tokens_per_row is None}
        if self.records is not None:
            self.records.fit(shared)
            fields = {name: field for name, field in fields.items() if name not in shared}
        self.pool.fit(fields)

    def state(self) -> State:
        """Pages and records, and what their fields follow from."""
        found: State = {"wide": dict(self.wide), "longest": self.longest, "pages": self.pool.state()}
        found |= {} if self.records is None else {"records": self.records.state()}
        return found | ({} if self.further is None else {"further": self.further})

    def restore(self, state: State, capacity: int, records: int) -> None:
        """See `state`; so many pages, and records."""
        wide = branch(state, "wide")
        self.wide, self.longest = {role: part_of(wide, role, bool) for role in self.wide}, whole(state, "longest")
        self._lay_out()
        self.pool.restore(branch(state, "pages"), capacity)
        if self.records is not None:
            self.records.restore(branch(state, "records"), records)
        self.further = None if self.further is None else tensor_like(state, "further", self.further)

    def write(
        self,
        rows: list[int],
        table: PageTable,
        first: int,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        records: PageTable | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Encodes tokens into slots `first` ... of `rows`: `[len(rows), kv_heads, any, head_dim]`, places int64 `[..., n]`.

        `order` int64 `[..., n]` says which of the tokens; without it, all. Where a segment is a row's or a page's tokens, they
        are one. `records` is the table of the rows' records.
        """
        if len(rows) > 1 and (self.records is not None or self._row_by_row):
            for i, row in enumerate(rows):
                own = slice(i, i + 1)
                chosen = None if order is None else order[own]
                self.write([row], table, first, keys[own], values[own], places[own], records, chosen)
            return
        if self.records is not None and records is not None:
            block = self.encode(rows, keys, values, places, order)
            self.write_block(rows, table, first, block)
            self.records.write_run(records.rows[rows[0]], 0, {name: part[0] for name, part in block.items()})
            return
        count = places.shape[2]
        piece = max(1, TILE_TOKENS // len(rows)) if self.plan.segments == "none" else count
        for at in range(0, count, piece):
            part = slice(at, at + piece)
            if order is None:
                block = self.encode(rows, keys[:, :, part], values[:, :, part], places[:, :, part])
            else:
                block = self.encode(rows, keys, values, places[:, :, part], order[:, :, part])
            self.write_block(rows, table, first + at, block)

    @property
    def _row_by_row(self) -> bool:
        """Where pieces must not depend on how many rows there are: products are rounded by their shapes."""
        return any(sparse_part(stages.codec) is not None for _, stages in self.plan.streams())

    def codec(self, role: str, rows: range | list[int]) -> Codec:
        """The codec of a stream for some rows."""
        codec = dict(self.plan.streams())[role].codec
        return bound(codec, self.dictionaries[role].of(rows)) if role in self.dictionaries else codec

    def write_block(self, rows: list[int], table: PageTable, first: int, block: Block) -> None:
        """Puts an encoded block `[len(rows), kv_heads, n, width]` into slots `first` ... of `rows`."""
        for i, row in enumerate(rows):
            self.pool.write_run(table.rows[row], first, {name: part[i] for name, part in block.items()})

    def encode(
        self, rows: range | list[int], keys: Tensor, values: Tensor, places: Tensor, order: Tensor | None = None
    ) -> Block:
        """The fields of tokens of `rows`, or of those at `order`."""
        block: dict[str, Tensor] = {}
        for role, tokens in (("keys", keys), ("values", values)):
            transform, codec = self.transforms[role].of(rows), self.codec(role, rows)
            own = counted(encoded(transform, codec, tokens, self.wide[role], order), self.further)
            block |= {f"{role}.{name}": part for name, part in own.items()}
        if self.positions:
            block[POSITIONS] = places.to(torch.int32)[..., None]
        return block

    def decode(self, rows: range | list[int], block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, float32 `[len(rows), kv_heads, n, head_dim]`."""
        found = []
        for role in ("keys", "values"):
            own = {name.removeprefix(f"{role}."): part for name, part in block.items() if name.startswith(role)}
            decoded = self.codec(role, rows).decode(own, self.coded[role])
            found.append(self.transforms[role].of(rows).inverse(decoded))
        return found[0], found[1]

    def decoded(self, row: int, pages: list[int], count: int, records: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values `[kv_heads, count, head_dim]` of a row that has these pages of the pool, and of records."""
        if not count:
            heads, device = self.pool.kv_heads, self.pool.device
            keys, values = (torch.zeros(heads, 0, width, device=device) for width in self.widths.values())
            return keys, values
        block = {
            name: tensor[pages].transpose(0, 1).flatten(1, 2)[None, :, : -(-count // rows)]
            for name, tensor in self.pool.tensors.items()
            for rows in [self.pool.rows_of(self.pool.fields[name])]
        }
        if self.records is not None:
            block |= {name: tensor[records] for name, tensor in self.records.tensors.items()}
        keys, values = self.decode([row], block)
        return keys[0], values[0]

    @property
    def placed(self) -> bool:
        """Whether it can be said which token lies in a slot."""
        return self.positions or self.first is not None

    def places(self, pages: Pages, start: int, stop: int) -> Tensor | slice:
        """The positions of the tokens in `pages`, whose slots are [start, stop): int64 `[rows, kv_heads, tokens]`; where they
        lie in order, the stretch that they are."""
        if self.first is not None:
            return slice(self.first + start, self.first + stop)
        return self.kept_places(pages)

    def kept_places(self, pages: Pages) -> Tensor:
        """The positions that lie in `pages` with their tokens: int64 `[rows, kv_heads, tokens]`."""
        return self.pool.read(pages, POSITIONS)[""].squeeze(2).long()
