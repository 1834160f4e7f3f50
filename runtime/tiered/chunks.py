"""Tokens stay exact until their chunk is complete; then its most salient tokens are encoded in the first tier, the others in the
following ones (ZipCache). Sinks stay exact for ever.

A chunk is the prompt, or a block of later tokens. The mass of its tokens comes from probe queries within it. Encoded tokens
never change again.
"""

import warnings
from collections.abc import Hashable
from operator import le
from typing import Any

import torch
from torch import Tensor

from calib.kernels.put_tokens.operation import Put, put_tokens
from calib.kernels.top_k.operation import divided
from calib.kernels.upload import upload
from calib.runtime.device.row_index import row_index
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.token_runs import TokenRuns
from calib.runtime.paging.window import Window
from calib.runtime.store import Footprint, LayerContext
from calib.runtime.tiered.chunk_changes import ChunkChanges
from calib.runtime.tiered.chunk_scores import ChunkScores
from calib.runtime.tiered.rope_on_read import unrotated
from calib.runtime.tiered.sequence_state import TieredSequenceState


class ChunkStore(ChunkScores):
    """The window holds the sinks, then the incomplete chunk."""

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        super().__init__(plan, keys, values, sequences, context)
        # Consecutive complete blocks can be encoded as one, if their tokens share no parameters and are not ranked within each
        # block.
        in_order = self.tiering.slots_from is not None and not self.observes
        self.joins_blocks = in_order and all(tier.encodes_any_number for tier in plan.tiers)
        longest, room = self.tiering.longest(), sequences.keeps_room
        self.windows = (Window(longest, keys, room), Window(longest, values, room))

    def prepare(self, forward: Forward) -> None:
        """Also makes room for the rows' parameters of the longest first chunk, and in windows that a decode step only appends
        to."""
        if self.sequences.row_params is not None:
            firsts = [
                self.tiering.first(self.sequences.prompt(row))
                for row, (before, after) in enumerate(zip(forward.before, forward.after, strict=True))
                if self.sequences.encoded(row, after) > 0 == self.sequences.encoded(row, before)
            ]
            for tier, tokens in zip(self.tiers, self.tiering.counts(max(firsts, default=0)), strict=False):
                tier.fit(tokens)
        super().prepare(forward)
        if forward.width == 1 and not self.encodes(forward):
            self._resize(max(self.sequences.slots(forward)[1].exact))

    @property
    def needs_positions(self) -> bool:
        """Whether tiers must keep positions: keys before RoPE are rotated to them, and they do not follow from slots."""
        return self.plan.before_rope and self.plan.tiering.slots_from is None

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`; a key only for steps before, during and after which the window has the memory that it needs."""
        assert self.windows is not None
        before, after = self.sequences.slots(forward)
        slots, allocated, left = self.windows[0].tokens.shape[2], self.windows[0].allocated, max(after.exact)
        most = max(left, max(before.exact))
        if allocated(left) != slots or (most > left and allocated(most) != slots):
            return None
        shapes = self.shapes(forward)
        return None if shapes is None else (shapes, len(self.mass), slots)

    def encodes(self, forward: Forward) -> bool:
        """As `Store.encodes`: whether the step completes a chunk of any row."""
        before, after = self.sequences.slots(forward)
        return any(map(le, after.exact, before.exact))

    def _store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Encodes complete chunks into tiers, and writes the other tokens to the window."""
        changes = ChunkChanges.of(forward, self.sequences, self.tiering, keys.device)
        self._resize(changes.most)
        for rows in changes.others:
            self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))
        if changes.going_on:
            self._append(changes, keys, values)
        self._resize(changes.left)

    def _append(self, changes: ChunkChanges, keys: Tensor, values: Tensor) -> None:
        """Appends one token to the rows whose chunk goes on. Adds the step's mass, unless the kernel did it at once (`_into`)."""
        assert self.windows is not None
        put_tokens(
            [
                Put(window.tokens, new, changes.slots, changes.rows)
                for window, new in zip(self.windows, (keys, values), strict=True)
            ]
        )
        if not self.shown.seen:
            return
        index: Any = slice(None) if changes.rows is None else changes.rows
        position: Any = changes.slots
        held, fresh = self.seen_by(list(range(changes.batch)), 1)
        self.mass[index, :, : held.shape[2]] += held[index]
        self.mass[index, :, position] += fresh[index, :, 0]

    def _take_in(self, rows: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores tokens of a group of rows, `[len(rows), kv_heads, n, D]`."""
        assert self.windows is not None
        before, after, prompt = forward.before[rows[0]], forward.after[rows[0]], self.sequences.prompt(rows[0])
        start, stop = self.tiering.complete(before, prompt), self.tiering.complete(after, prompt)
        exact, sinks = self.tiering.exact(before, prompt), self.tiering.sinks
        held, mass = self.seen_by(rows, after - before) if self.observes else (self.mass[: len(rows), :, :0], None)
        if exact:
            windows = (window.in_order(rows, 0, exact) for window in self.windows)
            keys, values = (torch.cat(pair, 2) for pair in zip(windows, (keys, values), strict=True))
        if exact and mass is not None:
            earlier = self.mass[row_index(rows, self.mass.device), :, :exact].clone()
            earlier[:, :, : held.shape[2]] += held[:, :, :exact]
            mass = torch.cat([earlier, mass], 2)
        at = sinks  # index of the next chunk's first token to encode
        while start < stop:
            chunk = self.tiering.chunk_of(start, prompt)
            if self.joins_blocks and chunk.start > sinks:
                chunk = range(start, stop)
            coded = range(max(chunk.start, sinks), chunk.stop)
            part = slice(at, at + len(coded))
            further = [forward.before[row] - before for row in rows]
            chunks = [range(coded.start + more, coded.stop + more) for more in further]
            self._encode(
                rows, forward, chunks, keys[:, :, part], values[:, :, part], None if mass is None else mass[:, :, part]
            )
            at, start = part.stop, chunk.stop
        if at > sinks:
            keys, values = (self._left(part, at) for part in (keys, values))
            mass = None if mass is None else self._left(mass, at)
        if keys.shape[2]:
            for window, new in zip(self.windows, (keys, values), strict=True):
                window.write(rows, 0, new)
        if mass is not None:
            index, left = row_index(rows, mass.device), mass.shape[2]
            self.mass[index, :, :left] = mass
            self.mass[index, :, left:] = 0

    def _left(self, tokens: Tensor, stop: int) -> Tensor:
        """What stays of `[rows, kv_heads, n, ...]` when tokens before `stop` are encoded: the sinks and the tokens from `stop`
        on."""
        return torch.cat([tokens[:, :, : self.tiering.sinks], tokens[:, :, stop:]], 2)

    def _encode(
        self,
        rows: list[int],
        forward: Forward,
        chunks: list[range],
        keys: Tensor,
        values: Tensor,
        mass: Tensor | None,
    ) -> None:
        """Encodes one chunk of each row, all equally long, `[len(rows), kv_heads, n, D]`."""
        if self.plan.measured is not None and max(chunk.stop for chunk in chunks) > self.plan.measured:
            warnings.warn(
                f"keys are encoded beyond position {self.plan.measured}, the last that the fit measured, with large errors; "
                "fit with --data.positions, or use rope='before'",
                stacklevel=2,
            )
        if self.plan.before_rope:
            assert self.context.rotation is not None
            keys = unrotated(forward, self.context.rotation, keys, chunks)
        scores = self.scores(rows, forward, chunks, mass)
        first = chunks[0].start == self.tiering.sinks
        if first:
            for role, tokens in (("keys", keys), ("values", values)):
                self.transforms.measure(self.shown, rows, role, tokens, None)
                if role in self.dictionaries:
                    self.dictionaries[role].sample(rows, tokens)
        offset = 0 if first else self.tiering.separate_prompt_tiers
        counts = self.tiering.counts(len(chunks[0]))[: self.plan.kinds]
        of_tiers = [None] * len(counts) if scores is None else divided(scores, counts)
        for number, (count, chosen) in enumerate(zip(counts, of_tiers, strict=True), offset):
            if first:  # an empty tier that gets tokens later takes the parameters of the whole chunk
                for role, tokens in (("keys", keys), ("values", values)):
                    self.transforms.measure(self.shown, rows, role, tokens, number, chosen if count else None)
            if count:
                tier, runs = self.tiers[number], self._runs(rows, forward, number, chunks)
                positions: int | Tensor = chunks[0].start
                if tier.stores_positions and len(set(chunks)) > 1:
                    starts = upload([chunk.start for chunk in chunks], torch.int64, keys.device)[:, None, None]
                    among = torch.arange(keys.shape[2], device=keys.device) if chosen is None else chosen
                    positions = (among + starts).expand(-1, self.heads, -1)
                tier.write(rows, runs, keys, values, positions, self.sequences.row_params, order=chosen)

    def _runs(self, rows: list[int], forward: Forward, number: int, chunks: list[range]) -> TokenRuns:
        """The slots of a tier that tokens of these chunks are written to; the same for every layer."""
        key = (TokenRuns, number, *rows, chunks[0])
        if key not in forward.readings:
            held = [
                self.sequences.held(row, chunk.start + self.tiering.window)[number]
                for row, chunk in zip(rows, chunks, strict=True)
            ]
            forward.readings[key] = self.sequences.tables[number].runs(rows, held)
        found: TokenRuns = forward.readings[key]
        return found

    def _resize(self, slots: int) -> None:
        for window in self.windows or ():
            window.resize(slots)

    def fit_rows(self) -> None:
        """Resizes the window."""
        self._resize(self.window_slots())

    def footprint(self) -> Footprint:
        """Bytes as in `TieredStore`, plus the window and the mass."""
        assert self.windows is not None
        weight = super().footprint()
        rows = len(self.sequences.lengths)
        size = rows * self.heads * sum(self.widths) * self.itemsize
        weight.kinds["window"] += self.windows[0].allocated(self.window_slots()) * size
        weight.kinds["saliency"] += rows * self.heads * self._mass_slots * 4
        return weight

    def growth(self) -> list[float]:
        """The share of a block's tokens that goes to each tier that blocks use."""
        return [0.0] * self.tiering.separate_prompt_tiers + [
            n / self.tiering.block for n in self.tiering.counts(self.tiering.block)
        ]
