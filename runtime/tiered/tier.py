"""One tier of one layer: keys and values of the same tokens in the same slots, each with its own encoding."""

import math

import torch
from torch import Tensor

from calib.kernels.quantise.prologue import Prologue
from calib.runtime.files.state import State, branch, part_of, tensor_like, whole
from calib.runtime.paging.field import Block, Field
from calib.runtime.paging.page_numbers import Pages
from calib.runtime.paging.pages import TILE_TOKENS, PageTable, tile_tokens
from calib.runtime.paging.pool import PagePool
from calib.runtime.paging.token_runs import TokenRuns
from calib.runtime.stages.codec.corrected import OUTLIERS, counted, counter
from calib.runtime.stages.codec.encoded import encoded, encodes_as_they_lie
from calib.runtime.stages.codec.exact import Exact
from calib.runtime.stages.codec.sized import Sized
from calib.runtime.stages.contract import Codec
from calib.runtime.stages.parameter_width import grown
from calib.runtime.stages.transform import Identity, coded_width
from calib.runtime.tiered.row_dictionary import RowDictionary
from calib.runtime.tiered.row_transform import RowTransform
from calib.runtime.tiered.tier_plan import TierPlan

POSITIONS = "positions"


class Tier:
    """The pages of one tier. A page has the fields of both codecs ("keys.words" and so on), and perhaps positions.

    If a row's tokens are in order, slot s holds the token at position `first` + s; None: in any order. `row_params` holds the
    parameters of the rows' segments, one page per row. `overflowed_outliers` counts outliers without a slot.
    """

    def __init__(
        self,
        plan: TierPlan,
        transforms: dict[str, RowTransform],
        keys: Tensor,
        values: Tensor,
        stores_positions: bool,
        dictionaries: dict[str, RowDictionary],
        first: int | None = None,
    ) -> None:
        """The first keys and values `[rows, kv_heads, n, head_dim]` fix shapes and the width of parameters.

        With `stores_positions`, every token's position is stored, int32, unless it follows from the slot. `dictionaries` are
        the rows' own atoms by role, if any.
        """
        self.plan, self.transforms, self.dictionaries = plan, transforms, dictionaries
        self.stores_positions, self.first = stores_positions and first is None, first
        self.relocated = plan.relocated
        self.widths, self.dtype = {"keys": keys.shape[3], "values": values.shape[3]}, keys.dtype
        # The width that codecs see: a basis may have fewer components than channels.
        self.coded = {role: coded_width(stages.transform, self.widths[role]) for role, stages in plan.streams()}
        self.fp32_params: dict[str, bool] = {}
        for (role, stages), like in zip(plan.streams(), (keys, values), strict=True):
            asked = like.shape[2] > 0 and not stages.codec.asks_extremes
            self.fp32_params[role] = stages.codec.fp32_params(like) if asked else False
        self.longest, heads, device = 0, keys.shape[1], keys.device
        self.pool = PagePool({}, heads, device, plan.page_tokens)
        self.row_params = PagePool({}, heads, device, 1) if plan.segments == "row" else None
        self.tile_tokens = tile_tokens(heads, max(keys.shape[3], *self.coded.values()))
        # One counter for keys and values together; either may be without thresholds.
        counters = (counter(stages.codec, device) for _, stages in plan.streams())
        self.overflowed_outliers = next((own for own in counters if own is not None), None)
        self._lay_out()

    def settle(self, extremes: dict[str, Tensor]) -> None:
        """Decides the width of parameters from the extremes of the first tokens, where given; called before anything is written."""
        for role, stages in self.plan.streams():
            if role in extremes and stages.codec.asks_extremes:
                self.fp32_params[role] = stages.codec.fp32_params(grown(extremes[role], stages.transform.growth))
        if any(self.fp32_params.values()):
            self._lay_out()

    def fit(self, tokens: int) -> None:
        """Makes room for a row's segment of `tokens` tokens."""
        if self.row_params is not None and tokens > self.longest:
            self.longest = tokens
            self._lay_out()

    def _lay_out(self) -> None:
        segment = self.plan.segment(self.pool.kv_heads, self.longest)
        fields: dict[str, Field] = {}
        for role, stages in self.plan.streams():
            own = stages.codec.fields(self.coded[role], self.dtype, self.fp32_params[role], segment)
            fields |= {f"{role}.{name}": field for name, field in own.items()}
        if self.stores_positions:
            fields[POSITIONS] = Field(1, 1, torch.int32, POSITIONS)
        shared = {name: field for name, field in fields.items() if field.tokens_per_row is None}
        if self.row_params is not None:
            self.row_params.fit(shared)
            fields = {name: field for name, field in fields.items() if name not in shared}
        self.pool.fit(fields)

    def state(self) -> State:
        """The pages, the rows' parameters, and what the layout of their fields depends on."""
        found: State = {"fp32_params": dict(self.fp32_params), "longest": self.longest, "pages": self.pool.state()}
        found |= {} if self.row_params is None else {"row_params": self.row_params.state()}
        return found | ({} if self.overflowed_outliers is None else {"overflowed_outliers": self.overflowed_outliers})

    def restore(self, state: State, capacity: int, row_params: int) -> None:
        """Restores the tier from `state`, with `capacity` pages and `row_params` pages of parameters. Raises StateError."""
        fp32_params = branch(state, "fp32_params")
        self.fp32_params, longest = (
            {role: part_of(fp32_params, role, bool) for role in self.fp32_params},
            whole(state, "longest"),
        )
        self.longest = longest if row_params else 0  # no room for parameters where no row has any
        self._lay_out()
        self.pool.restore(branch(state, "pages"), capacity)
        if self.row_params is not None:
            self.row_params.restore(branch(state, "row_params"), row_params)
        self._order_lists()
        self.overflowed_outliers = (
            None
            if self.overflowed_outliers is None
            else tensor_like(state, "overflowed_outliers", self.overflowed_outliers)
        )

    def _order_lists(self) -> None:
        """Sorts listed outliers into the order in which kernels read them."""
        for role, stages in self.plan.streams():
            corrected, pool = stages.codec.corrections, self.pool if self.row_params is None else self.row_params
            if corrected is not None and corrected.outliers is not None and pool.device.type != "meta":
                corrected.outliers.ordered(
                    part_named(pool.tensors, f"{role}.{OUTLIERS}".removesuffix(".")), self.coded[role]
                )

    def write(
        self,
        rows: list[int],
        runs: TokenRuns,
        keys: Tensor,
        values: Tensor,
        positions: int | Tensor,
        row_params: PageTable | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Encodes tokens `[len(rows), kv_heads, any, head_dim]` into the slots `runs` of `rows`.

        `order` int64 `[len(rows), kv_heads, n]` selects tokens; None: all. `positions` is that of the first token, which the
        others follow, or one for each encoded token, shaped like `order`. Where a row's or a page's tokens are one segment, the
        call must bring the whole segment. `row_params` is the table of the rows' parameters.
        """
        if len(rows) > 1 and (self.row_params is not None or self._row_by_row):
            for i, row in enumerate(rows):
                own = slice(i, i + 1)
                chosen = None if order is None else order[own]
                at = positions if isinstance(positions, int) else positions[own]
                self.write([row], runs.of_row(i), keys[own], values[own], at, row_params, chosen)
            return
        if self.row_params is not None and row_params is not None:
            block = self.encode(rows, keys, values, positions, order)
            self.pool.write_runs(runs, block)
            self.row_params.write_runs(row_params.runs(rows, 0), block)
            return
        count = keys.shape[2] if order is None else order.shape[2]
        group = math.lcm(*(stages.codec.token_group() for _, stages in self.plan.streams()))
        piece = max(group, TILE_TOKENS // len(rows) // group * group)
        if self.plan.segments != "none" or (count > piece and self._encodes_as_they_lie(rows, keys, values)):
            piece = count
        for at in range(0, count, piece):
            part = slice(at, at + piece)
            there = positions if isinstance(positions, int) else positions[:, :, part]
            if order is not None:
                block = self.encode(rows, keys, values, there, order[:, :, part])
            else:
                there = there + at if isinstance(there, int) else there
                block = self.encode(rows, keys[:, :, part], values[:, :, part], there)
            self.pool.write_runs(runs.behind(at), block)

    def _encodes_as_they_lie(self, rows: list[int], keys: Tensor, values: Tensor) -> bool:
        """Whether encoding any number of tokens at once takes no more memory than its result."""
        return self.plan.prediction is None and all(
            encodes_as_they_lie(self.transforms[role].of(rows), self.codec(role, rows), tokens)
            for role, tokens in (("keys", keys), ("values", values))
        )

    @property
    def _row_by_row(self) -> bool:
        """Whether rows are encoded one by one, because rounding would depend on how many rows a product has."""
        return any(stages.codec.row_by_row for _, stages in self.plan.streams())

    def codec(self, role: str, rows: range | list[int]) -> Codec:
        """The codec of keys or of values for some rows, with their own atoms."""
        codec = dict(self.plan.streams())[role].codec
        return codec.bound(self.dictionaries[role].of(rows)) if role in self.dictionaries else codec

    def encode(
        self,
        rows: range | list[int],
        keys: Tensor,
        values: Tensor,
        positions: int | Tensor,
        order: Tensor | None = None,
    ) -> Block:
        """The encoded fields of tokens of `rows`, or of those at `order`; arguments as in `write`."""
        block: dict[str, Tensor] = {}
        for role, tokens in (("keys", keys), ("values", values)):
            transform, codec, chosen = self.transforms[role].of(rows), self.codec(role, rows), order
            if role == "values" and self.plan.prediction is not None:
                own_keys = part_named(block, "keys")
                tokens = Prologue(order=order).gathered(tokens)
                tokens, chosen = self.plan.prediction.taken_off(tokens, self.key_codes(rows), own_keys), None
            own = counted(encoded(transform, codec, tokens, self.fp32_params[role], chosen), self.overflowed_outliers)
            block |= {f"{role}.{name}": part for name, part in own.items()}
        if self.stores_positions:
            if isinstance(positions, int):
                if order is None:
                    order = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
                positions = order + positions
            block[POSITIONS] = positions.to(torch.int32)[..., None]
        return block

    def decode(self, rows: range | list[int], block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of encoded fields, float32 `[len(rows), kv_heads, n, head_dim]`."""
        found = []
        for role in ("keys", "values"):
            decoded = self.codec(role, rows).decode(part_named(block, role), self.coded[role])
            found.append(self.transforms[role].of(rows).inverse(decoded))
        if self.plan.prediction is not None:
            found[1] = found[1] + self.plan.prediction.values(self.key_codes(rows), part_named(block, "keys"))
        return found[0], found[1]

    def as_held(self, rows: range | list[int], block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values for encoding them again: exact ones without a copy or conversion, others decoded."""
        if all(type(stages.codec) is Exact and type(stages.transform) is Identity for _, stages in self.plan.streams()):
            return block["keys.exact"], block["values.exact"]
        return self.decode(rows, block)

    def key_codes(self, rows: range | list[int]) -> Sized:
        """The codec of the keys' codes, from which values are predicted."""
        codec = self.codec("keys", rows).uncorrected
        assert isinstance(codec, Sized)
        return codec

    def decoded(self, row: int, pages: list[int], count: int, row_params: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values `[kv_heads, count, head_dim]` of a row with these `pages` in the pool and in `row_params`."""
        if not count:
            heads, device = self.pool.kv_heads, self.pool.device
            keys, values = (
                torch.zeros(heads, 0, width, dtype=torch.float32, device=device) for width in self.widths.values()
            )
            return keys, values
        block = self.pool.of_row(pages, count)
        if self.row_params is not None:
            block |= {name: tensor[row_params] for name, tensor in self.row_params.tensors.items()}
        keys, values = self.decode([row], block)
        return keys[0], values[0]

    @property
    def knows_positions(self) -> bool:
        """Whether the position of the token in a slot is known."""
        return self.stores_positions or self.first is not None

    def positions(self, pages: Pages, start: int, stop: int) -> Tensor | slice:
        """The positions of the tokens in `pages`, whose slots are [start, stop): int64 `[rows, kv_heads, tokens]`, or a slice
        where tokens are in order."""
        if self.first is not None:
            return slice(self.first + start, self.first + stop)
        return self.kept_positions(pages)

    def kept_positions(self, pages: Pages) -> Tensor:
        """The positions stored in `pages`: int64 `[rows, kv_heads, tokens]`."""
        return self.pool.read(pages, POSITIONS)[""].squeeze(2).long()


def part_named(block: Block, role: str) -> dict[str, Tensor]:
    """The fields of one role, without the role's prefix in their names."""
    return {name.removeprefix(f"{role}."): part for name, part in block.items() if name.startswith(f"{role}.")}
