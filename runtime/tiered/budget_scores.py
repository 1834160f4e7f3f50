"""What the tokens of a budget weigh: which queries count, and what is kept of their attention."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from calib.kernels.upload import upload
from calib.runtime.attend.attention_stats import Observed
from calib.runtime.attend.request import AttendRequest
from calib.runtime.device.row_index import row_index
from calib.runtime.paging.forward import Forward
from calib.runtime.stages.saliency import FastGen
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.store import LayerContext
from calib.runtime.tiered.probe_rows import LayerProbes
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.store import TieredStore


class BudgetScores(TieredStore):
    """`mass [rows, numbers x kv_heads, slots]` float32: what the saliency has kept of each important token's attention since it
    came, behind that how many rows have seen it where scores depend on it; nothing where the newest tokens fill the budget.

    Of a prompt the probes count; of a later forward all queries, or the newest. A decode step has one query, whose probabilities
    are there anyway, and a token must have been seen when it leaves the newest ones: probe steps would save nothing and leave
    tokens without a score.

    `policies [rows, kv_heads]` uint8: of `FastGen`, what each head has chosen.
    """

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        super().__init__(plan, keys, values, sequences, context)
        self.tiering: HeavyHitterBudget = plan.tiering
        self.numbers = 0 if self.saliency is None else 1 + self.saliency.counts_rows
        self.mass = torch.zeros(keys.shape[0], self.numbers * self.heads, 0, device=keys.device)
        self.of_rows: tuple[str, ...] = ("mass",)
        measured = (transform.measured for transform in self.transforms.values())
        self.measures_queries = any(recipe is not None and recipe.needs_queries for recipe in measured)
        if isinstance(self.saliency, FastGen):
            self.policies = torch.zeros(*keys.shape[:2], dtype=torch.uint8, device=keys.device)
            self.of_rows = ("mass", "policies")

    @property
    def observes(self) -> bool:
        """Also to measure a transform by the queries."""
        return self.saliency is not None or self.measures_queries

    @property
    def needs_positions(self) -> bool:
        """Where scores tie the earlier token stays."""
        return True

    @property
    def asks_ids(self) -> bool:
        """Whether a token's id decides what it weighs."""
        return isinstance(self.saliency, FastGen) and bool(self.saliency.special_ids)

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """As the strategy says for a prompt; without one every query, or the newest ones."""
        if self.saliency is None:
            return torch.arange(0)
        if self.plan.probes is not None:
            return LayerProbes(self.plan.probes, self.rng).of_prompt(length, ids)
        return torch.arange(length)[-(self.saliency.newest or length) :]

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """The same queries, and all or the newest of rows that hold tokens already, on the important tier and the new tokens."""
        if self.saliency is None:
            return None
        count, newest = forward.counts[rows.start], self.saliency.newest
        begin = [] if self.plan.probes is None else [row for row in rows if not forward.before[row]]
        if not begin and (newest is None or newest >= count):
            return Observed(tier=True)
        looked = torch.zeros(len(rows), count)
        looked[:, -(newest or count) :] = 1
        for row in begin:
            looked[row - rows.start] = 0
            looked[row - rows.start, self.prompt_probes(row, count, self._ids(forward, row))] = 1
        return Observed(True, upload(looked, looked.dtype, device)[:, :, None])

    def attend(self, request: AttendRequest) -> Tensor:
        """Also chooses a policy for each KV head of a row that begins."""
        output = super().attend(request)
        if request.observe and isinstance(self.saliency, FastGen):
            for i, row in enumerate(request.rows):
                if not request.forward.before[row]:
                    self.shown.policies[row] = self._chosen(self.saliency, request, i)
        return output

    @torch.no_grad()
    def _chosen(self, saliency: FastGen, request: AttendRequest, i: int) -> Tensor:
        row, forward = request.rows[i], request.forward
        ids, length = self._ids(forward, row), request.given.keys.shape[2]
        probes = self.prompt_probes(row, length, ids)
        special = self._special(forward, [row]) if self.asks_ids else None
        return saliency.chosen(
            self.shown.seen[request.rows].new[i],
            lambda window: self._mass_of_prompt(request, i, probes, window),
            None if special is None else special[0, 0],
            *self.tiering.sizes(self.sequences.prompt(row)),
        )

    def _special(self, forward: Forward, rows: list[int]) -> Tensor:
        """Which of the tokens that rows of equal length bring are special: bool `[len(rows), 1, n]`."""
        assert isinstance(self.saliency, FastGen)
        if forward.ids is None:
            raise ValueError(
                "policy='fastgen' with special_ids needs token ids: call the model with input_ids, not with inputs_embeds"
            )
        whole = forward.columns is None and len(rows) == len(forward.before)
        ids = forward.ids if whole else torch.stack([self._ids(forward, row) for row in rows])  # type: ignore[misc]
        asked: list[int] = list(self.saliency.special_ids)
        special = forward.tensor("special ids", lambda _: asked, self.mass.device)
        if ids.device != special.device:
            ids = ids.to(special.device, non_blocking=True)
        return (ids[:, None, :, None] == special).any(-1)

    def seen_by(self, rows: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Of all KV heads together where they share one set."""
        parts = super().seen_by(rows, count)
        if not self.plan.shared_across_heads:
            return parts
        held, fresh = (part.sum(1, keepdim=True).expand_as(part) for part in parts)
        return held, fresh

    def observed(self, forward: Forward, rows: list[int], positions: Tensor) -> tuple[Tensor, Tensor]:
        """What a forward adds to `mass` of held tokens and what it is of the new ones, at `positions [len(rows), 1, n]` of rows of
        equal length: `[len(rows), numbers x kv_heads, slots or n]`."""
        count = positions.shape[2]
        if self.saliency is None:
            return self.mass.new_zeros(len(rows), 0, 0), self.mass.new_zeros(len(rows), 0, count)
        held, fresh = self.seen_by(rows, count)
        begins = not forward.before[rows[0]]
        if isinstance(self.saliency, FastGen):
            if begins:
                self.policies[row_index(rows, self.policies.device)] = torch.stack(
                    [self.shown.policies[row] for row in rows]
                )
            policies = self.policies
            if len(rows) != len(policies):
                policies = policies[row_index(rows, policies.device)]
            special = self._special(forward, rows) if self.asks_ids else None
            held, fresh = self.saliency.weighed(policies, held, fresh, positions, special)
        if not self.saliency.counts_rows:
            return held, fresh
        seen = torch.arange(count, 0, -1, device=fresh.device)[None]  # each token by those from its own on
        if begins and self.plan.probes is not None:
            of_rows = torch.stack([self._seen_in_prompt(forward, row, count) for row in rows])
            seen = upload(of_rows, torch.int64, fresh.device)
        numbers = torch.full_like(held, count), seen[:, None].expand_as(fresh).to(fresh.dtype)
        return torch.cat([held, numbers[0]], 1), torch.cat([fresh, numbers[1]], 1)

    def _seen_in_prompt(self, forward: Forward, row: int, count: int) -> Tensor:
        """How many probe rows see each token of a prompt, those at its position and behind: int64 `[count]` on the host."""
        probes = self.shown.probes.get(row)
        if probes is None:
            probes = self.prompt_probes(row, count, self._ids(forward, row))
        return len(probes) - torch.searchsorted(probes, torch.arange(count))

    def of_numbers(self, index: Tensor) -> Tensor:
        """An index of tokens `[rows, kv_heads, ...]` as one of `mass [rows, numbers x kv_heads, ...]`."""
        return index if self.numbers == 1 else torch.cat([index] * self.numbers, 1) if self.numbers else index[:, :0]

    def scores(self, mass: Tensor) -> Tensor:
        """What tokens of this `mass [..., numbers x kv_heads, tokens]` are worth: `[..., kv_heads, tokens]`."""
        assert self.saliency is not None
        return self.saliency.scores(mass[..., : self.heads, :], mass[..., -self.heads :, :])

    @abstractmethod
    def _resize(self, slots: int) -> None:
        """Room for the mass of so many slots."""
