"""One stream of one layer, keys or values: its stages, its pages and its window, and how tokens move between them."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from calib.runtime.pages import PagePool, PageTable
from calib.runtime.rows import Forward
from calib.runtime.stages.contract import Block, Codec, Schedule, Transform
from calib.runtime.window import Window

Stage = TypeVar("Stage", Transform, Codec)

# The most tokens that are ever in float32 at once while a long prompt is encoded or pages are attended.
TILE_TOKENS = 4096


@dataclass(frozen=True)
class StreamPlan:
    """The stages of a stream: what a method decides."""

    transform: Transform
    codec: Codec
    schedule: Schedule

    def tables(self) -> list[Tensor]:
        """Tensors of the artifact that the stages hold, shared by all rows."""
        return [
            value
            for stage in (self.transform, self.codec)
            for value in vars(stage).values()
            if isinstance(value, Tensor)
        ]

    def to(self, device: torch.device) -> "StreamPlan":
        """The same stages with their tables on `device`, in storage of their own."""
        return replace(self, transform=_moved(self.transform, device), codec=_moved(self.codec, device))


def _moved(stage: Stage, device: torch.device) -> Stage:
    own = {name: value for name, value in vars(stage).items() if isinstance(value, Tensor)}
    return replace(stage, **{name: value.to(device, copy=True) for name, value in own.items()})  # type: ignore[type-var]


class Stream:
    """Storage of one stream. Tokens arrive in the window or, where the schedule says so, go straight to pages."""

    def __init__(self, role: str, plan: StreamPlan, like: Tensor) -> None:
        """`like [rows, kv_heads, tokens, head_dim]`: the first tokens, which fix shapes, dtype and parameter width."""
        self.role, self.plan = role, plan.to(like.device)
        self.head_dim = like.shape[3]
        self.wide = plan.codec.wide(self.plan.transform.forward(like)) if like.shape[2] else False
        self.window = Window(plan.schedule.window(), like)
        self.pool = PagePool(plan.codec.fields(self.head_dim, like.dtype, self.wide), like.shape[1], like.device)

    def prepare(self, forward: Forward, table: PageTable) -> None:
        """Room for what the forward adds; pages that were shared and will be written are duplicated."""
        self.pool.grow(table.capacity)
        self.pool.copy(forward.copies)

    def store_step(self, forward: Forward, table: PageTable, new: Tensor) -> None:
        """Stores one token for each row, `new [rows, kv_heads, 1, head_dim]`, whatever the rows' lengths are."""
        schedule = self.plan.schedule
        starts = [schedule.packed(before) for before in forward.before]
        stops = [schedule.packed(after) for after in forward.after]
        leaving = [row for row, (start, stop) in enumerate(zip(starts, stops, strict=True)) if stop > start]
        if leaving:
            # A schedule lets go of one token a step or of a whole block: the same count for all rows that let go.
            count, first = stops[leaving[0]] - starts[leaving[0]], [starts[row] for row in leaving]
            block = self._encode(self._oldest(forward, leaving, first, count, new))
            if count == 1 and len(leaving) > 1:
                places = [table.place(row, start) for row, start in zip(leaving, first, strict=True)]
                pages = forward.tensor(f"{self.role}.pages", [page for page, _ in places], new.device)
                slots = forward.tensor(f"{self.role}.slots", [slot for _, slot in places], new.device)
                self.pool.write_tokens(pages, slots, block)
            else:
                for i, (row, start) in enumerate(zip(leaving, first, strict=True)):
                    self.pool.write_run(table.rows[row], start, {name: part[i] for name, part in block.items()})
        self.window.resize(max(map(schedule.slots, forward.after)))
        staying = [row for row, stop in enumerate(stops) if stop <= forward.before[row]]
        newest = [forward.before[row] % self.window.size for row in staying]
        if len(staying) == len(stops) and len(set(newest)) == 1:
            self.window.tokens[:, :, newest[0]] = new[:, :, 0]
        elif staying:
            rows = forward.tensor(f"{self.role}.staying", staying, new.device)
            slots = forward.tensor(f"{self.role}.newest", newest, new.device)
            self.window.tokens[rows, :, slots] = new[rows, :, 0]

    def _oldest(self, forward: Forward, leaving: list[int], first: list[int], count: int, new: Tensor) -> Tensor:
        """The `count` oldest exact tokens of the rows `leaving`, from the window and then from `new`."""
        held = forward.before[leaving[0]] - first[0]
        if held and count == 1:
            slots = [token % self.window.size for token in first]
            if len(leaving) == new.shape[0] and len(set(slots)) == 1:
                return self.window.tokens[:, :, slots[0], None]
            rows = forward.tensor(f"{self.role}.leaving", leaving, new.device)
            return self.window.tokens[rows, :, forward.tensor(f"{self.role}.oldest", slots, new.device)][:, :, None]
        rows = forward.tensor(f"{self.role}.leaving", leaving, new.device)
        if held == 0:
            return new.index_select(0, rows)
        # A block begins at slot 0 and the new token completes it.
        return torch.cat([self.window.tokens[:, :, :held], new], 2).index_select(0, rows)

    def store_run(self, rows: list[int], before: int, after: int, table: PageTable, new: Tensor) -> None:
        """Stores `new [len(rows), kv_heads, after - before, head_dim]` for rows that all held `before` tokens."""
        start, stop = self.plan.schedule.packed(before), self.plan.schedule.packed(after)
        tokens = torch.cat([self.window.in_order(rows, start, before), new], 2) if start < before else new
        # Pieces end where token groups end, because every block of a schedule is a whole number of groups.
        group = self.plan.codec.token_group()
        piece = max(group, TILE_TOKENS // len(rows) // group * group)
        for first in range(start, stop, piece):
            last = min(first + piece, stop)
            block = self._encode(tokens[:, :, first - start : last - start])
            for i, row in enumerate(rows):
                self.pool.write_run(table.rows[row], first, {name: part[i] for name, part in block.items()})
        if stop < after:
            self.window.write(rows, stop, tokens[:, :, stop - start :])

    def _encode(self, tokens: Tensor) -> Block:
        return self.plan.codec.encode(self.plan.transform.forward(tokens), self.wide)
