"""A stream is the keys or the values of one layer: its stages, pages and window, and how tokens move between them."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.kernels.dispatch import prefers_triton
from calib.kernels.put_tokens.operation import Put
from calib.runtime.device.extremes import Extremes
from calib.runtime.device.graph_inputs import Numbers
from calib.runtime.device.row_index import row_index
from calib.runtime.files.state import State, branch, part_of, tensor_like
from calib.runtime.ordered.key_bias import BiasAtPositions
from calib.runtime.paging.field import Block
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.pages import TILE_TOKENS, PageTable, tile_tokens
from calib.runtime.paging.pool import Memory, PagePool, device_memory
from calib.runtime.paging.token_runs import TokenRuns
from calib.runtime.paging.window import Window
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.corrected import counted, counter
from calib.runtime.stages.codec.encoded import encoded, encodes_as_they_lie
from calib.runtime.stages.codec.in_pages import mapped, packed_stream
from calib.runtime.stages.contract import Codec, Transform
from calib.runtime.stages.parameter_width import may_need_fp32
from calib.runtime.stages.selection import Schedule
from calib.runtime.stages.to_device import tensors_of, to_device


@dataclass(frozen=True)
class StreamPlan:
    """The stages of keys or of values, which a method decides."""

    transform: Transform
    codec: Codec
    schedule: Schedule

    def tables(self) -> list[Tensor]:
        """Tensors of the artifact that the stages hold, shared by all rows."""
        return tensors_of(self.transform) + tensors_of(self.codec)

    def to(self, device: torch.device) -> "StreamPlan":
        """The same stages with their tables on `device`, in storage of their own."""
        return replace(self, transform=to_device(self.transform, device), codec=to_device(self.codec, device))


MOST_KNOWN = 4096  # lengths whose steps are cached


class _Step(NamedTuple):
    """Where the tokens of a decode step go. With a window: groups of rows that are `encoding` a block; the number of `window`
    slots in use afterwards; and the window `slots` of the new tokens of `rows` (None: all rows). Without a window: the pages
    `rows` and their `slots`."""

    encoding: list[list[int]]
    window: int
    rows: Tensor | None
    slots: Tensor | int | None


class Stream:
    """Storage of keys or of values. New tokens go to the window or, where the schedule says so, straight to pages."""

    def __init__(
        self,
        role: str,
        plan: StreamPlan,
        like: Tensor,
        memory: Memory = device_memory,
        rotation: Rotation | None = None,
        keeps_room: bool = False,
    ) -> None:
        """`like [rows, kv_heads, tokens, head_dim]` are the first tokens, which fix shapes, dtype and parameter width. `memory`
        allocates pages; `rotation` is the model's RoPE, needed where a key bias is folded; `keeps_room` allocates all window
        slots."""
        self.role, self.plan, self.rotation = role, plan.to(like.device), rotation
        self.head_dim = like.shape[3]
        self.tile_tokens = tile_tokens(like.shape[1], like.shape[3])
        self.fp32_params = False
        self.extremes: Extremes | None = None  # until the first tokens have decided the width of parameters
        if like.shape[2]:
            self._ask(self._coded(like))
        self.window = Window(plan.schedule.window(), like, keeps_room)
        fields = plan.codec.fields(self.head_dim, like.dtype, self.fp32_params)
        self.pool = PagePool(fields, like.shape[1], like.device, memory=memory)
        self.overflowed_outliers = counter(plan.codec, like.device)
        self._steps: dict[int, tuple[int, bool]] = {}
        self.encodes_plainly = self._encodes_plainly()

    def _ask(self, coded: Tensor) -> None:
        """Decides whether parameters of tokens like `coded` need float32, or starts a copy of their extremes, which `settle`
        reads."""
        if not self.plan.codec.asks_extremes:
            self.fp32_params = self.plan.codec.fp32_params(coded)
        elif may_need_fp32(self.plan.codec, coded.dtype):
            self.extremes = Extremes(coded)

    def settle(self) -> None:
        """Decides the width of parameters from the first tokens; called before anything is written."""
        extremes, self.extremes = self.extremes, None
        if extremes is not None and self.plan.codec.fp32_params(extremes.read()):
            self.fp32_params = True
            self.pool.fit(self.plan.codec.fields(self.head_dim, self.window.tokens.dtype, True))

    def _coded(self, like: Tensor) -> Tensor:
        """The tokens as the codec sees them. Tokens that the transform only moves are not copied: a prompt in float32 would be
        written and read once more."""
        prologue = self.plan.transform.prologue()
        return like if prologue is not None and prologue.moves else self.plan.transform.forward(like)

    @property
    def bias(self) -> BiasAtPositions | None:
        """The bias that is subtracted from keys before they are encoded; None without one."""
        stage = self.plan.transform.key_bias
        if stage is None:
            return None
        assert self.rotation is not None, "a folded bias without the model's RoPE"
        return BiasAtPositions(stage, self.rotation)

    @property
    def in_pages(self) -> PackedStream | None:
        """The pages in the form that an attention kernel reads; None where no kernel does."""
        return self.pool.derived.once("stream", self._in_pages, (prefers_triton(self.pool.device),))

    def _in_pages(self) -> PackedStream | None:
        return mapped(packed_stream(self.plan.codec, self.pool, self.head_dim), self.plan.transform)

    def decoded(self, table: PageTable, row: int, length: int) -> Tensor:
        """The decoded tokens of a row of `length` tokens, in order: float32 `[kv_heads, packed tokens, head_dim]`."""
        pool, group, packed = self.pool, self.plan.codec.token_group(), self.plan.schedule.packed(length)
        if not packed:
            return torch.zeros(pool.kv_heads, 0, self.head_dim, dtype=torch.float32, device=pool.device)
        whole = -(-packed // group) * group  # a group's codes are read together with its parameters
        pages = table.pages(row, 0, -(-packed // pool.page_tokens))
        block = pool.of_row(pages, whole)
        tokens = self.plan.transform.inverse(self.plan.codec.decode(block, self.head_dim))[0, :, :packed].to(
            pool.device
        )
        return tokens if self.bias is None else self.bias.whole(tokens)

    def read_back(self, table: PageTable, row: int, length: int) -> Tensor:
        """All tokens of a row in order, `[kv_heads, length, head_dim]` in the model's dtype: decoded ones, then the window."""
        decoded = self.decoded(table, row, length).to(self.window.tokens.device, self.window.tokens.dtype)
        return torch.cat([decoded, self.window.in_order([row], decoded.shape[1], length)[0]], 1)

    def prepare(self, forward: Forward, table: PageTable) -> None:
        """Makes room for what the forward adds, and duplicates shared pages that will be written."""
        self.pool.grow(table.capacity, table.page_tokens)
        if forward.copies[0]:
            self.pool.copy(forward.copies[0])
        if forward.width == 1 and forward.columns is None and not self.encodes(forward):
            self.window.resize(self._step_of(forward)[0])

    def to(self, device: torch.device) -> None:
        """Moves everything to `device`."""
        self.plan = self.plan.to(device)
        self.window.tokens = self.window.tokens.to(device)
        self.pool.to(device)
        self.overflowed_outliers = None if self.overflowed_outliers is None else self.overflowed_outliers.to(device)

    def state(self, lengths: list[int]) -> State:
        """Pages and window of rows of these lengths, for a file."""
        self.settle()
        counted: State = {} if self.overflowed_outliers is None else {"overflowed_outliers": self.overflowed_outliers}
        window = self.window.state(max(map(self.plan.schedule.slots, lengths), default=0))
        return {"fp32_params": self.fp32_params, "pages": self.pool.state(), "window": window} | counted

    def restore(self, state: State, table: PageTable, lengths: list[int]) -> None:
        """Fills the stream from `state`, with the pages of `table` and rows of `lengths`. Raises StateError where it does not
        fit."""
        self.fp32_params = part_of(state, "fp32_params", bool)
        self.pool.fit(self.plan.codec.fields(self.head_dim, self.window.tokens.dtype, self.fp32_params))
        self.pool.restore(branch(state, "pages"), table.capacity, table.page_tokens)
        self.window.restore(branch(state, "window"), max(map(self.plan.schedule.slots, lengths), default=0))
        self.overflowed_outliers = (
            None
            if self.overflowed_outliers is None
            else tensor_like(state, "overflowed_outliers", self.overflowed_outliers)
        )

    def _encodes_plainly(self) -> bool:
        """Whether a decode step's token goes straight into pages, and is encoded without further work."""
        if self.plan.schedule.window():
            return False
        prologue = self.plan.transform.prologue()
        plain = prologue is not None and prologue.moves and self.bias is None and self.overflowed_outliers is None
        return plain

    def store_step(self, forward: Forward, table: PageTable, new: Tensor, block: Block | None) -> list[Put]:
        """Stores one token for each row, `new [rows, kv_heads, 1, head_dim]`, for rows of any lengths. Returns the writes that
        the caller must still do with `put_tokens`. `block` has the encoded tokens, if they are encoded already."""
        key = ("step", self.role, new.device)
        if key not in forward.readings:  # the same for every layer
            forward.readings[key] = self._step(forward, table, new.device)
        step: _Step = forward.readings[key]
        if not self.window.size:  # straight into pages
            assert step.rows is not None and isinstance(step.slots, Tensor)
            if block is None:
                block = self._encode(new if self.bias is None else self.bias.off(forward, new))
            return self.pool.puts(step.rows, step.slots, block)
        for rows in step.encoding:
            self._write_pages(rows, forward, table, new)
        self.window.resize(step.window)
        return [] if step.slots is None else [Put(self.window.tokens, new, step.slots, step.rows)]

    def _step(self, forward: Forward, table: PageTable, device: torch.device) -> "_Step":
        """The `_Step` of a forward; the same for every layer."""
        schedule, size = self.plan.schedule, self.window.size
        if not size:
            pages, slots = (forward.tensor(*numbers, device) for numbers in _positions(table))
            return _Step([], 0, pages, slots)
        encoding = [rows for rows in forward.equal_length_groups if range(*self._encoding(forward, rows[0]))]
        window = max(map(schedule.slots, forward.after))
        staying = [row for row, after in enumerate(forward.after) if schedule.packed(after) < after]
        newest = {forward.before[row] % size for row in staying}
        if not staying:
            return _Step(encoding, window, None, None)
        if len(staying) == len(forward.after) and len(newest) == 1 and not forward.of_block:
            return _Step(encoding, window, None, newest.pop())
        at = forward.tensor(f"{self.role} staying", lambda _: staying, device)
        slots = forward.tensor(f"{self.role} newest", lambda step: [step.before[row] % size for row in staying], device)
        return _Step(encoding, window, at, slots)

    def _encoding(self, forward: Forward, row: int) -> tuple[int, int]:
        """The range of a row's tokens that a forward encodes: (first, stop)."""
        encoded = self.plan.schedule.encoded
        return max(encoded(forward.before[row]), forward.oldest[row]), encoded(forward.after[row])

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`; None where the window has other memory than the step needs."""
        rows, _, slots, _ = self.window.tokens.shape
        if self.window.allocated(self._step_of(forward)[0]) != slots:
            return None
        return rows, slots

    def encodes(self, forward: Forward) -> bool:
        """As `Store.encodes`: whether any row's tokens move from the window into pages."""
        return self.window.size > 0 and self._step_of(forward)[1]

    def _step_of(self, forward: Forward) -> tuple[int, bool]:
        """`_step_at` over all rows: the most window slots, and whether any row encodes; computed once for all layers."""
        key = ("slots and whether it encodes", self.role)
        if key not in forward.readings:
            slots, encodes = zip(*map(self._step_at, forward.before), strict=True)
            forward.readings[key] = max(slots), any(encodes)
        found: tuple[int, bool] = forward.readings[key]
        return found

    def _step_at(self, length: int) -> tuple[int, bool]:
        """For one more token in a row of `length`: window slots in use afterwards, and whether any token is encoded. Cached,
        because rows of one length and consecutive steps need the same."""
        if length not in self._steps:
            if len(self._steps) > MOST_KNOWN:
                self._steps.clear()
            schedule, after = self.plan.schedule, length + 1
            encodes = schedule.encoded(length) < schedule.encoded(after)
            self._steps[length] = schedule.slots(after), encodes
        return self._steps[length]

    def store_run(self, rows: list[int], forward: Forward, table: PageTable, new: Tensor) -> None:
        """Stores the new tokens of `rows`, a group of equal length: `new [len(rows), kv_heads, their tokens, head_dim]`."""
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        self._write_pages(rows, forward, table, new, own=True)
        first = max(before, self.plan.schedule.packed(after))
        if first < after:
            self.window.write(rows, first, new[:, :, first - before :])

    def _write_pages(self, rows: list[int], forward: Forward, table: PageTable, new: Tensor, own: bool = False) -> None:
        """Encodes the tokens that the schedule says. `new` holds the tokens of all rows of the batch, or of `rows` if `own`."""
        before, (start, stop) = forward.before[rows[0]], self._encoding(forward, rows[0])
        if start >= stop:
            return
        tokens = new if own or len(rows) == new.shape[0] else new[row_index(rows, new.device)]
        if start < before:
            tokens = torch.cat([self.window.in_order(rows, start, before), tokens], 2)
        else:
            tokens = tokens[:, :, start - before :]
        # Pieces end where token groups end, because every block of a schedule is a whole number of groups.
        group = self.plan.codec.token_group()
        piece = max(group, TILE_TOKENS // len(rows) // group * group)
        if stop - start > piece and self.bias is None:
            whole = encodes_as_they_lie(self.plan.transform, self.plan.codec, tokens)
            piece = stop - start if whole else piece
        for first in range(start, stop, piece):
            last = min(first + piece, stop)
            taken = tokens[:, :, first - start : last - start]
            block = self._encode(taken if self.bias is None else self.bias.off(forward, taken, first))
            self.pool.write_runs(self._runs(forward, table, rows, first), block)

    @staticmethod
    def _runs(forward: Forward, table: PageTable, rows: list[int], first: int) -> TokenRuns:
        """The slots that tokens from `first` on are written to; the same for every layer."""
        key = (TokenRuns, table, *rows, first)
        if key not in forward.readings:
            forward.readings[key] = table.runs(rows, first)
        found: TokenRuns = forward.readings[key]
        return found

    def _encode(self, tokens: Tensor) -> Block:
        return counted(
            encoded(self.plan.transform, self.plan.codec, tokens, self.fp32_params), self.overflowed_outliers
        )


def _positions(table: PageTable) -> Iterator[tuple[str, Numbers[Forward]]]:
    """For pages and for slots a name and a function of the forward: where each row's next token goes."""

    def part(number: int, step: Forward) -> list[int]:
        return [table.location(row, held)[number] for row, held in enumerate(step.before)]

    for number, name in enumerate(("pages", "slots")):
        yield name, partial(part, number)
