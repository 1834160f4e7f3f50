"""A budget that is applied once, to the prompt (SnapKV): afterwards no token is moved or evicted.

The slots of the only tier hold the kept tokens of the prompt in order of position, then every later token. So neither positions
nor attention mass have to be kept.
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
    """The first forward of a row is its prompt, whose attention decides; later forwards are not observed."""

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
        """The same queries, observed on the new tokens of rows that hold none yet."""
        if all(forward.before[row] for row in rows):
            return None
        count = forward.counts[rows.start]
        looked = torch.arange(count, device=device) >= count - (self.saliency.newest or count)
        return Observed(False, looked.float()[None, :, None].expand(len(rows), -1, -1))

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`; every decode step writes one token."""
        return self.shapes(forward)

    def _store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores the budget's share of a prompt, and every token of a later forward."""
        if forward.width == 1 and forward.columns is None and all(forward.before):
            self._step(forward, keys, values)
        elif forward.width:  # 0 where no draft was kept
            for rows in self.sequences.equal_length_groups(forward):
                self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))

    def _step(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores one token for each row, all rows at once."""
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
        """Stores any number of tokens of rows of equal length and prompt, `[len(rows), kv_heads, n, D]`."""
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        order = None
        if not before:
            for role, tokens in (("keys", keys), ("values", values)):
                for tier in (None, 0):
                    self.transforms.measure(self.shown, rows, role, tokens, tier)
            if self.tiering.kept(after) < after:
                order = self._chosen(rows, after)
        first = self.sequences.held(rows[0], before)[0]
        self.tiers[0].write(rows, self.sequences.tables[0].runs(rows, first), keys, values, before, order=order)

    def _chosen(self, rows: list[int], prompt: int) -> Tensor:
        """The positions that are kept of prompts of `prompt` tokens, ascending: int64 `[len(rows), kv_heads, kept]`."""
        mass = self.seen_by(rows, prompt)[1]
        if self.plan.shared_across_heads:
            mass = mass.sum(1, keepdim=True).expand_as(mass)
        prefix = prompt - self.tiering.recent  # recent tokens always stay, and are not pooled with the others
        positions = torch.arange(prompt, device=mass.device)
        seen = (prompt - positions).clamp(max=self.saliency.newest or prompt)
        scores = self.saliency.scores(mass[..., :prefix], seen[:prefix])
        # On ties, which pooling makes frequent, earlier tokens stay.
        heavy = top_k(scores, self.tiering.kept(prompt) - self.tiering.recent)
        return torch.cat([heavy, positions[prefix:].expand(len(rows), self.heads, -1)], -1)

    def fit_rows(self) -> None:
        """Does nothing: all tokens are in pages."""

    def growth(self) -> list[float]:
        """Every later token stays in the tier."""
        return [1.0]
