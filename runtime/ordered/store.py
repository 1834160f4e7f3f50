"""A store that keeps tokens in order of position: keys and values have a schedule each, and share one page table."""

import copy
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.kernels.put_tokens.operation import put_tokens
from calib.runtime.attend.attend import attend
from calib.runtime.attend.prompt_attention import is_prompt, prompt
from calib.runtime.attend.request import AttendRequest
from calib.runtime.files.state import State, branch
from calib.runtime.held_tier import HeldTier, in_order
from calib.runtime.ordered.sequence_state import OrderedSequenceState
from calib.runtime.ordered.spans import OrderedTokens
from calib.runtime.ordered.stream import Stream, StreamPlan
from calib.runtime.paging.field import Block
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import EMPTY, PAGE_TOKENS
from calib.runtime.paging.pages import GROWTH, HOST_GROWTH
from calib.runtime.paging.pinned_kv import PinnedKV
from calib.runtime.paging.pool import device_memory
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.codec.corrected import counts_of
from calib.runtime.stages.contract import Codec
from calib.runtime.stages.schedule import SlidingResidual
from calib.runtime.stages.transform import Identity
from calib.runtime.store import Footprint, LayerContext, Plan, Recoding


def _lengths(*windows: int) -> list[int]:
    """The row lengths at which schedules must be checked: near the first multiples of each window, by a page to either side."""
    near = PAGE_TOKENS + 2
    return sorted({n for w in windows for k in range(5) for n in range(max(0, k * w - near), k * w + near)})


@dataclass(frozen=True)
class LayerPlan(Plan):
    """The stages of one layer's keys and values. Raises ValueError for stages that pages and windows cannot hold.

    With `on_host` the pages are in host memory, a token's key beside its value, and tiles are fetched when they are attended.
    """

    keys: StreamPlan
    values: StreamPlan
    on_host: bool = False

    in_order = True

    def __post_init__(self) -> None:
        lengths = _lengths(self.keys.schedule.window(), self.values.schedule.window())
        for role, stream in (("keys", self.keys), ("values", self.values)):
            group = stream.codec.token_group()
            if PAGE_TOKENS % group:
                raise ValueError(
                    f"{role}: a group of {group} tokens does not divide a page of {PAGE_TOKENS}; use 1, 2, 4 ... {PAGE_TOKENS}"
                )
            if any(stream.schedule.encoded(n) % group for n in lengths):
                raise ValueError(
                    f"{role}: blocks of {stream.schedule.window()} tokens are no whole number of groups of {group} tokens; "
                    f"use a residual that {group} divides"
                )
        if any(self.values.schedule.packed(n) > self.keys.schedule.packed(n) for n in lengths):
            raise ValueError(
                "values would be encoded before the keys of the same tokens; encode keys at least as early"
            )

    @staticmethod
    def exact(on_host: bool = False) -> "LayerPlan":
        """The plan that keeps every token exact, in pages."""
        stream = StreamPlan(Identity(), Exact(), SlidingResidual(0))
        return LayerPlan(stream, stream, on_host)

    @property
    def needs_rope(self) -> str | None:
        """The advice to give where the model's RoPE is not supported, if the bias of keys is folded: it is rotated by RoPE."""
        return None if self.keys.transform.key_bias is None else "use key_bias='kept'"

    @property
    def lacks_key_bias(self) -> bool:
        """Whether the bias of keys is folded and not set yet."""
        found = self.keys.transform.key_bias
        return found is not None and found.bias is None

    def with_key_bias(self, bias: Tensor) -> "LayerPlan":
        """The same plan with this bias of keys."""
        found = self.keys.transform.key_bias
        return self if found is None else replace(self, keys=replace(self.keys, transform=found.with_bias(bias)))

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for groups that do not divide the head."""
        for stream in (self.keys, self.values):
            stream.codec.fields(head_dim, dtype, False)

    def sequences(self, layers: int, sliding: int | None) -> OrderedSequenceState:
        """The sequence state of both schedules; pages are fitted to short rows where tokens go straight into pages, one by one."""
        streams = (self.keys, self.values)
        single = all(stream.schedule.window() == 0 and stream.codec.token_group() == 1 for stream in streams)
        growth = HOST_GROWTH if self.on_host else GROWTH
        schedules = self.keys.schedule, self.values.schedule
        return OrderedSequenceState(*schedules, layers, sliding, growth, fitted=single and not self.on_host)

    def open(
        self, keys: Tensor, values: Tensor, sequences: OrderedSequenceState, context: LayerContext
    ) -> "OrderedStore":
        """An empty store, with its pages on the device or on the host."""
        pairs = PinnedKV(keys.shape[3], values.shape[3]) if self.on_host else None
        memory = {role: device_memory if pairs is None else pairs.of(role) for role in ("keys", "values")}
        room = sequences.keeps_room
        streams = (
            Stream("keys", self.keys, keys, memory["keys"], context.rotation, room),
            Stream("values", self.values, values, memory["values"], keeps_room=room),
        )
        return OrderedStore(streams, sequences, pairs)

    def tables(self) -> list[Tensor]:
        """The tables of keys and of values."""
        return self.keys.tables() + self.values.tables()

    def codecs(self) -> list[Codec]:
        """The codecs of keys and of values."""
        return [self.keys.codec, self.values.codec]

    def pairs(self, context: LayerContext) -> "list[LayerPlan]":
        """The plan itself, because all tokens are encoded alike."""
        return [self]

    def recoded(self, change: Recoding) -> "LayerPlan":
        """The same plan with other codecs for keys and values."""
        keys, values = (
            replace(stream, codec=change(role, stream.transform, stream.codec))
            for role, stream in (("keys", self.keys), ("values", self.values))
        )
        return replace(self, keys=keys, values=values)

    def to(self, device: torch.device) -> "LayerPlan":
        """The same plan with its stages' tables on `device`."""
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))


class OrderedStore:
    """Keys and values of one layer, each a `Stream`; `pairs` is the host memory of their pages, or None."""

    observes = False

    def __init__(
        self, streams: tuple[Stream, Stream], sequences: OrderedSequenceState, pairs: PinnedKV | None = None
    ) -> None:
        self.streams, self.sequences, self.pairs = streams, sequences, pairs

    def __deepcopy__(self, memo: dict[int, Any]) -> "OrderedStore":
        """Copies the host memory before the streams, whose pages are views of it."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copy.deepcopy(self.pairs, memo)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def plan(self) -> LayerPlan:
        """The stages, with tables on the streams' device."""
        keys, values = (stream.plan for stream in self.streams)
        return LayerPlan(keys, values, on_host=self.pairs is not None)

    def prepare(self, forward: Forward) -> None:
        """Makes room in the pages of keys and values."""
        table = self.sequences.table
        for stream in self.streams:
            stream.prepare(forward, table)

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention as `runtime/attend` computes it. Storing does not depend on it, so nothing is observed."""
        if is_prompt(request):
            return prompt(request)
        return attend(OrderedTokens(self.sequences, request, *self.streams))

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores new tokens in windows and pages, as the schedules say."""
        for stream in self.streams:
            if stream.extremes is not None:
                stream.settle()
        table, given = self.sequences.table, list(zip(self.streams, (keys, values), strict=True))
        if forward.width == 1 and forward.columns is None:
            blocks = self._encoded_pair(keys, values) or (None, None)
            steps = zip(given, blocks, strict=True)
            put_tokens([put for (stream, new), own in steps for put in stream.store_step(forward, table, new, own)])
            return
        for stream, new in given:
            slots = stream.plan.schedule.slots
            stream.window.resize(max(map(slots, forward.before + forward.after)))
            for rows in forward.equal_length_groups:
                stream.store_run(rows, forward, table, forward.real(new, rows))
            stream.window.resize(max(map(slots, forward.after)))

    def _encoded_pair(self, keys: Tensor, values: Tensor) -> tuple[Block, Block] | None:
        """The tokens of a decode step, keys and values encoded by one call; None where that is not supported."""
        one, other = self.streams
        if not (one.encodes_plainly and other.encodes_plainly) or one.fp32_params != other.fp32_params:
            return None
        return one.plan.codec.encode_pair(other.plan.codec, (keys, values), one.fp32_params)

    def encodes(self, forward: Forward) -> bool:
        """As `Store.encodes`."""
        return any(stream.encodes(forward) for stream in self.streams)

    def branch(self, forward: Forward) -> Hashable:
        """As `Store.branch`: nothing, launches are equal in all steps of a block."""
        return None

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`; None for pages on the host."""
        if self.pairs is not None or any(forward.copies):
            return None
        streams, table = tuple(stream.graph_key(forward) for stream in self.streams), self.sequences.table
        # The number and size of pages that pools have after `prepare`.
        shared = table.capacity, table.page_tokens, self.sequences.graph_key(forward)
        return None if None in streams else (streams, shared)

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Copies windows; pages are shared through the table."""
        for stream in self.streams:
            stream.window.permute(sources.to(stream.window.tokens.device))
            stream.window.resize(max(map(stream.plan.schedule.slots, self.sequences.lengths), default=0))
            if kept[0] is not None:
                stream.pool.keep(kept[0])

    def to(self, device: torch.device) -> None:
        """Moves keys and values to `device`."""
        for stream in self.streams:
            stream.to(device)

    def state(self) -> State:
        """Keys and values, for a file."""
        return {stream.role: stream.state(self.sequences.lengths) for stream in self.streams}

    def restore(self, state: State) -> None:
        """Fills the store from `state`. Raises StateError where it does not fit."""
        for stream in self.streams:
            stream.restore(branch(state, stream.role), self.sequences.table, self.sequences.lengths)

    def read_back(self, row: int) -> tuple[Tensor, Tensor]:
        """As `Store.read_back`."""
        length, table = self.sequences.lengths[row], self.sequences.table
        keys, values = (stream.read_back(table, row, length) for stream in self.streams)
        return keys, values

    def footprint(self) -> Footprint:
        """Bytes of pages, windows and drafts."""
        weight = Footprint()
        for stream in self.streams:
            pool, itemsize = stream.pool, stream.window.tokens.element_size()
            if self.pairs is None:
                weight.kinds.update(pool.bytes_by_kind(self.sequences.table.capacity))
                weight.marginal += pool.bytes_per_token()
            else:
                weight.host += pool.bytes_by_kind(self.sequences.table.capacity).total()
            weight.kinds["outliers"] += 0 if stream.overflowed_outliers is None else 8
            slots = max(map(stream.plan.schedule.slots, self.sequences.lengths), default=0)
            size = len(self.sequences.lengths) * pool.kv_heads * stream.head_dim * itemsize
            held = stream.window.allocated(slots) + self.sequences.unconfirmed
            weight.kinds["window"] += held * size
            weight.values += pool.kv_heads * stream.head_dim
        return weight

    def tiers_of(self, row: int) -> list[HeldTier]:
        """Packed tokens, those of which only the key is packed, and exact ones; without those that a sliding window has dropped."""
        length, pages = self.sequences.lengths[row], self.sequences.table.rows[row]
        keys, values = self.streams
        of_keys, of_values = (stream.plan.schedule.packed(length) for stream in self.streams)
        of_key, of_value = (stream.pool.bits_per_value(stream.head_dim) for stream in self.streams)
        exact = 8.0 * keys.window.tokens.element_size()
        dropped = next((number for number, page in enumerate(pages) if page != EMPTY), 0)
        start = dropped * self.sequences.table.page_tokens
        spans = [
            (start, of_values, of_key, of_value),
            (max(start, of_values), of_keys, of_key, exact),
            (max(start, of_keys), length, exact, exact),
        ]
        return in_order(spans, values.pool.kv_heads, values.pool.device, host=self.pairs is not None)

    def on_host(self) -> list[Tensor]:
        """The pages, if they are in host memory."""
        return [] if self.pairs is None or self.pairs.pairs is None else [self.pairs.pairs]

    def overflowed_outliers(self) -> int:
        """The sum over keys and values."""
        return counts_of(stream.overflowed_outliers for stream in self.streams)
