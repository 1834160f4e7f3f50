"""The first tokens for ever and a ring of the newest (StreamingLLM): no scores, no moves; the oldest token is overwritten."""

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from calib.runtime.attend.attention_stats import Observed
from calib.runtime.paging.forward import Forward
from calib.runtime.stages.tiering import Sinks
from calib.runtime.tiered.store import TieredStore


class SinkStore(TieredStore):
    """Two tiers: sink token t is in slot t of the first, any other token t in slot (t - sinks) % window of the second."""

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """No query is observed."""
        return torch.arange(0)

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """Observes nothing."""
        return None

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`; a key only for decode steps of rows that have all their sinks."""
        return self.shapes(forward) if self._goes_on(forward) else None

    def _goes_on(self, forward: Forward) -> bool:
        """Whether every row gets one token, which is not a sink."""
        tiering: Sinks = self.plan.tiering
        return forward.width == 1 and forward.columns is None and min(forward.before) >= tiering.sinks

    def _store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Writes each token to its slot."""
        tiering: Sinks = self.plan.tiering
        if self._goes_on(forward):
            self._step(tiering, forward, keys, values)
            return
        for rows in self.sequences.equal_length_groups(forward):
            own = [forward.real(part, rows) for part in (keys, values)]
            before, after = forward.before[rows[0]], forward.after[rows[0]]
            self._write(0, rows, before, before, min(after, tiering.sinks), own, before)
            # Of a long forward only the tokens that the window will hold.
            position = max(before, tiering.sinks, after - tiering.window)
            while position < after:  # at most two iterations: the ring's end and its beginning
                slot = (position - tiering.sinks) % tiering.window
                stop = min(after, position + tiering.window - slot)
                self._write(1, rows, slot, position, stop, own, before)
                position = stop

    def _step(self, tiering: Sinks, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores one token for each row, all rows at once."""
        tier, table = self.tiers[1], self.sequences.tables[1]

        def at(part: int, step: Forward) -> list[int]:
            slots = ((length - tiering.sinks) % tiering.window for length in step.before)
            return [table.location(row, slot)[part] for row, slot in enumerate(slots)]

        pages, slots = (
            forward.tensor(name, partial(at, part), keys.device)
            for part, name in enumerate(("pages of the ring", "slots of the ring"))
        )
        positions = forward.tensor("positions to store", lambda step: step.before, keys.device, torch.int32)
        rows = list(range(len(forward.before)))
        block = tier.encode(rows, keys, values, positions[:, None, None].expand(-1, self.heads, 1))
        tier.pool.write_tokens(pages, slots, block)

    def _write(
        self, tier: int, rows: list[int], slot: int, start: int, stop: int, own: list[Tensor], before: int
    ) -> None:
        if start >= stop:
            return
        part = slice(start - before, stop - before)
        keys, values = (tokens[:, :, part] for tokens in own)
        self.tiers[tier].write(rows, self.sequences.tables[tier].runs(rows, slot), keys, values, start)

    def fit_rows(self) -> None:
        """Does nothing: both tiers are in pages."""

    def growth(self) -> list[float]:
        """No tier grows in the long run."""
        return [0.0, 0.0]
