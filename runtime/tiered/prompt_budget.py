"""A budget that is applied once, when the prompt ends (SnapKV): no token is moved, and none leaves, after that.

Slots of the only tier: what is kept of the prompt in the order of positions, then every later token as it comes. So neither a
token's position nor its attention mass has to be kept.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calib.kernels.top_k.operation import top_k
from calib.runtime.attend.attention_stats import Observed
from calib.runtime.paging.forward import Forward
from calib.runtime.stages.selection import Saliency
from calib.runtime.stages.tiering import PromptBudget
from calib.runtime.store import LayerContext
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.store import TieredStore


class PromptBudgetStore(TieredStore):
    """The prompt of a row is its first forward; its attention decides, that of later forwards is not observed."""

    saliency: Saliency

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        super().__init__(plan, keys, values, sequences, context)
        self.tiering: PromptBudget = plan.tiering

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """The newest queries, or all."""
        return torch.arange(length)[-(self.saliency.newest or length) :]

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """The same queries, on the new tokens of rows that hold none yet."""
        if all(forward.before[row] for row in rows):
            return None
        count = forward.counts[rows.start]
        looked = torch.arange(count, device=device) >= count - (self.saliency.newest or count)
        return Observed(False, looked.float()[None, :, None].expand(len(rows), -1, -1))

    def graph_key(self, forward: Forward) -> Hashable | None:
        """See `Store.graph_key`: every step writes one token."""
        return self.shapes(forward)

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Of a prompt what the budget holds, of any later forward everything."""
        if self.extremes:
            self.settle()
        if forward.width == 1 and forward.columns is None and all(forward.before):
            self._step(forward, keys, values)
        elif forward.width:  # of drafts perhaps none was kept
            for rows in self.sequences.equal_length_groups(forward):
                self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))
        self.shown.clear()

    def _step(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """One token for each row, all rows at once."""
        tier, table = self.tiers[0], self.sequences.tables[0]

        def at(part: int, step: Forward) -> list[int]:
            held = self.sequences.held_before(step)
            return [table.location(row, count)[part] for row, (count, *_) in enumerate(held)]

        pages, slots = (
            forward.tensor(name, partial(at, part), keys.device)
            for part, name in enumerate(("next pages", "next slots"))
        )
        positions = forward.tensor("token positions", lambda step: step.before, keys.device)[:, None, None]
        rows = list(range(len(forward.before)))
        tier.pool.write_tokens(pages, slots, tier.encode(rows, keys, values, positions.expand(-1, self.heads, 1)))

    def _take_in(self, rows: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Any number of tokens of rows of equal length and prompt, `[len(rows), kv_heads, n, D]`."""
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        order = None
        if not before:
            for role, tokens in (("keys", keys), ("values", values)):
                for tier in (None, 0):
                    self.measure(rows, role, tokens, tier)
            if self.tiering.kept(after) < after:
                order = self._chosen(rows, after)
        first = self.sequences.held(rows[0], before)[0]
        self.tiers[0].write(rows, self.sequences.tables[0].runs(rows, first), keys, values, before, order=order)

    def _chosen(self, rows: list[int], prompt: int) -> Tensor:
        """The positions that stay of prompts of so many tokens, rising: int64 `[len(rows), kv_heads, kept]`."""
        mass = self.seen_by(rows, prompt)[1]
        if self.plan.shared_across_heads:
            mass = mass.sum(1, keepdim=True).expand_as(mass)
        prefix = prompt - self.tiering.recent  # the others stay whatever they got, and lend their mass to nobody
        positions = torch.arange(prompt, device=mass.device)
        seen = (prompt - positions).clamp(max=self.saliency.newest or prompt)
        scores = self.saliency.scores(mass[..., :prefix], seen[:prefix])
        # Of equals, of which a pool makes many, the earlier stay.
        heavy = top_k(scores, self.tiering.kept(prompt) - self.tiering.recent)
        return torch.cat([heavy, positions[prefix:].expand(len(rows), self.heads, -1)], -1)

    def fit_rows(self) -> None:
        """Nothing: all is in pages."""

    def growth(self) -> list[float]:
        """Every token stays."""
        return [1.0]
