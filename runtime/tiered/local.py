"""Initial and local tokens stay exact; of blocks that leave the window only representative keys stay on the device (InfLLM)."""

from typing import Any

import torch
from torch import Tensor

from calib.kernels.probe_saliency.operation import attention_mass
from calib.kernels.upload import upload
from calib.runtime.attend.attention_stats import AttentionStats, Observed
from calib.runtime.attend.request import AttendRequest
from calib.runtime.device.row_index import row_index
from calib.runtime.files.state import State, branch, fitting
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.window import Window
from calib.runtime.stages.tiering import InitialAndWindow
from calib.runtime.store import Footprint, LayerContext
from calib.runtime.tiered.rope_on_read import unrotated
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.store import TieredStore


class LocalStore(TieredStore):
    """The window holds the local tokens in order; `mass [rows, kv_heads, slots]` is what later queries within a window gave
    them.

    `representatives [rows, kv_heads, blocks, r, D]` are keys in the model's dtype; they are before RoPE where the plan
    relocates.
    """

    of_rows = ("mass", "representatives")

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        super().__init__(plan, keys, values, sequences, context)
        self.tiering: InitialAndWindow = plan.tiering
        self.windows = (Window(self.tiering.longest(), keys), Window(self.tiering.longest(), values))
        self.mass = torch.zeros(*keys.shape[:2], 0, dtype=torch.float32, device=keys.device)
        self.representatives = keys.new_zeros(*keys.shape[:2], 0, plan.representatives, keys.shape[3])

    @property
    def relocates(self) -> bool:
        """Whether tokens before the window are attended at the position just before it."""
        return bool(self.plan.relocates)

    @property
    def observes(self) -> bool:
        """True: attention decides which keys represent a block."""
        return True

    def cos_sin_to_blocks(self, forward: Forward, rows: range, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """cos and sin that rotate a query such that it scores keys before RoPE as if they were just before the window; None
        without relocation."""
        if not self.relocates:
            return None
        assert self.context.rotation is not None
        key = ("turns to blocks", rows, device)
        if key not in forward.readings:
            positions = [1 - self.tiering.first(forward.before[row]) for row in rows]
            forward.readings[key] = self.context.rotation.cos_sin(positions, device)
        cos_sin: tuple[Tensor, Tensor] = forward.readings[key]
        return cos_sin

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """All queries; `watch` and `_seen_of_prompt` say for which tokens each counts."""
        return torch.arange(length)

    @torch.no_grad()
    def _seen_of_prompt(self, request: AttendRequest) -> AttentionStats:
        logits, (query, keys, _) = request.logits, request.given
        length, window = keys.shape[2], self.tiering.window
        mass = attention_mass(
            query,
            keys,
            torch.arange(length),
            logits.scale,
            logits.softcap,
            logits.sliding,
            (1, window),
            request.normalisers,
        )
        return AttentionStats(mass[:, :, :0], mass)

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """Observes every query, on the tokens that precede it by at most the window."""
        key = ("behind", rows, device)
        if key not in forward.readings:
            before = [forward.before[row] for row in rows]
            first = [self.tiering.first(length) for length in before]
            start, begin = (upload(part, torch.int64, device)[:, None] for part in (before, first))
            columns = torch.arange(forward.counts[rows.start], device=device)
            slots = torch.arange(max(b - f for b, f in zip(before, first, strict=True)), device=device)
            positions = torch.cat([begin + slots, start + columns], -1)
            behind = (start + columns)[:, :, None] - positions[:, None]
            forward.readings[key] = ((behind >= 1) & (behind <= self.tiering.window)).float()
        return Observed(False, forward.readings[key])

    def _store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores initial tokens in their tier and the others in the window, which they leave in whole blocks."""
        held = [self.tiering.exact(n, 0) for n in forward.before]
        left = [self.tiering.exact(n, 0) for n in forward.after]
        self._resize(max(held + left))
        step = forward.width == 1 and forward.columns is None
        going_on = [row for row, count in enumerate(held) if step and left[row] == count + 1]
        if going_on:
            self._append(going_on, held, forward, keys, values)
        for rows in self.sequences.equal_length_groups(forward):
            rows = [row for row in rows if row not in going_on]
            if rows:
                self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))
        self._resize(max(left))

    def _append(self, rows: list[int], held: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Appends one token to each of `rows`, whose windows no block leaves."""
        assert self.windows is not None
        slots = [held[row] for row in rows]
        seen, fresh = self.seen_by(list(range(len(held))), 1)
        index: Any = forward.tensor("rows that go on", lambda _: rows, keys.device)
        at: Any = forward.tensor("their slots", lambda _: slots, keys.device)
        if len(rows) == len(held) and len(set(slots)) == 1:
            index, at = slice(None), slots[0]
        for window, new in zip(self.windows, (keys, values), strict=True):
            window.tokens[index, :, at] = new[index, :, 0]
        self.mass[index, :, : seen.shape[2]] += seen[index]
        self.mass[index, :, at] = fresh[index, :, 0]

    def _take_in(self, rows: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores tokens of rows of equal length, `[len(rows), kv_heads, n, D]`."""
        assert self.windows is not None
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        local = self.tiering.exact(before, 0)
        held, fresh = self.seen_by(rows, after - before)
        mass = torch.cat([self.mass[row_index(rows, self.mass.device), :, :local], fresh], 2)
        mass[:, :, : min(local, held.shape[2])] += held[:, :, :local]
        windows = (window.in_order(rows, 0, local) for window in self.windows)
        keys, values = (torch.cat(pair, 2) for pair in zip(windows, (keys, values), strict=True))
        position = before - local  # of the first of these tokens
        initial = max(0, min(after, self.tiering.initial) - position)
        if initial:
            first = (keys[:, :, :initial], values[:, :, :initial])
            self.tiers[0].write(rows, self.sequences.tables[0].runs(rows, position), *first, position)
        leaving = (self.tiering.blocks(after) - self.tiering.blocks(before)) * self.tiering.block
        if leaving:
            start = position + initial
            span = slice(initial, initial + leaving)
            self._represent(rows, forward, range(start, start + leaving), keys[:, :, span], mass[:, :, span])
        rest = slice(initial + leaving, None)
        for window, tokens in zip(self.windows, (keys, values), strict=True):
            window.write(rows, 0, tokens[:, :, rest])
        own = mass[:, :, rest]
        self.mass[row_index(rows, self.mass.device)] = torch.nn.functional.pad(
            own, (0, self.mass.shape[2] - own.shape[2])
        )

    def _represent(self, rows: list[int], forward: Forward, span: range, keys: Tensor, mass: Tensor) -> None:
        """Keeps the representative keys of the blocks in a span of tokens: in each block those with the most mass."""
        size = self.tiering.block
        if self.relocates:
            assert self.context.rotation is not None
            keys = unrotated(forward, self.context.rotation, keys, [span])
        chosen = mass.unflatten(2, (-1, size)).sort(dim=-1, descending=True, stable=True).indices
        chosen = chosen[..., : self.representatives.shape[3]]
        blocks = keys.unflatten(2, (-1, size))
        found = blocks.gather(3, chosen[..., None].expand(*chosen.shape, keys.shape[3]))
        first = self.tiering.blocks(forward.before[rows[0]])
        self._fit(first + found.shape[2])
        index = row_index(rows, keys.device)
        self.representatives[index, :, first : first + found.shape[2]] = found.to(self.representatives.dtype)

    def _fit(self, blocks: int) -> None:
        """Makes room for the representatives of `blocks` blocks."""
        have = self.representatives
        if blocks > have.shape[2]:
            self.representatives = torch.cat(
                [have, have.new_zeros(*have.shape[:2], blocks - have.shape[2], *have.shape[3:])], 2
            )

    def _resize(self, slots: int) -> None:
        assert self.windows is not None
        for window in self.windows:
            window.resize(slots)
        size = self.windows[0].allocated(slots)
        kept = self.mass[:, :, :size]
        self.mass = (
            torch.nn.functional.pad(kept, (0, size - kept.shape[2])) if size != self.mass.shape[2] else self.mass
        )

    def fit_rows(self) -> None:
        """Resizes the window and the mass."""
        self._resize(self.window_slots())

    def restore(self, state: State) -> None:
        """As `TieredStore.restore`, for any number of representatives that covers every block which has left the window."""
        shape = (*self.representatives.shape[:2], None, *self.representatives.shape[3:])
        found = fitting(branch(state, "of_rows"), "representatives", self.representatives.dtype, shape)
        self._fit(max(found.shape[2], *map(self.tiering.blocks, self.sequences.lengths)))
        super().restore(state)

    def footprint(self) -> Footprint:
        """Bytes as in `TieredStore`, plus the window, the mass and the representatives."""
        weight = super().footprint()
        assert self.windows is not None
        rows, slots = len(self.sequences.lengths), self.windows[0].allocated(self.window_slots())
        weight.kinds["window"] += slots * rows * self.heads * sum(self.widths) * self.itemsize
        weight.kinds["saliency"] += slots * rows * self.heads * 4
        # As many blocks as any row has, or had when room was made.
        blocks, keys = self.representatives.shape[2:4]
        weight.marginal += keys * self.heads * self.widths[0] * self.itemsize / self.tiering.block
        weight.kinds["representatives"] += blocks * keys * rows * self.heads * self.widths[0] * self.itemsize
        return weight

    def growth(self) -> list[float]:
        """No tier grows in the long run; only the representatives do, which are not in a tier."""
        return [0.0]
