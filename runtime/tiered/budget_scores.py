"""Scores of the tokens in a budget: which queries count, and what is kept of the attention that tokens get."""

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
    """`mass [rows, numbers x kv_heads, slots]` float32: the attention mass that the saliency has kept for each important token
    since it arrived; after the mass of all heads, where scores depend on it (`numbers` is 2), how many queries have seen the
    token. `numbers` is 0 without a saliency, where the newest tokens fill the budget.

    In a prompt only probe queries count; in a later forward all queries, or the newest. A decode step has one query, whose
    probabilities are computed anyway. Probing only some steps would save nothing, and could leave tokens without a score when
    they leave the ring.

    `policies [rows, kv_heads]` uint8: the policy that each head has chosen (`FastGen`).
    """

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        super().__init__(plan, keys, values, sequences, context)
        self.tiering: HeavyHitterBudget = plan.tiering
        self.numbers = 0 if self.saliency is None else 1 + self.saliency.counts_rows
        self.mass = torch.zeros(keys.shape[0], self.numbers * self.heads, 0, dtype=torch.float32, device=keys.device)
        self.of_rows: tuple[str, ...] = ("mass",)
        measured = (transform.measured for transform in self.transforms.values())
        self.measures_queries = any(recipe is not None and recipe.needs_queries for recipe in measured)
        if isinstance(self.saliency, FastGen):
            self.policies = torch.zeros(*keys.shape[:2], dtype=torch.uint8, device=keys.device)
            self.of_rows = ("mass", "policies")

    @property
    def observes(self) -> bool:
        """Whether saliency needs attention, or a transform is measured from queries."""
        return self.saliency is not None or self.measures_queries

    @property
    def needs_positions(self) -> bool:
        """True: where scores tie, the earlier token stays."""
        return True

    @property
    def asks_ids(self) -> bool:
        """Whether scores depend on token ids."""
        return isinstance(self.saliency, FastGen) and bool(self.saliency.special_ids)

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """The probes of the plan's strategy; without one all queries, or the newest of them."""
        if self.saliency is None:
            return torch.arange(0)
        if self.plan.probes is not None:
            return LayerProbes(self.plan.probes, self.rng).of_prompt(length, ids)
        return torch.arange(length)[-(self.saliency.newest or length) :]

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """The probes of rows that begin, and all or the newest queries of other rows, observed on the important tier and new
        tokens."""
        if self.saliency is None:
            return None
        count, newest = forward.counts[rows.start], self.saliency.newest
        begin = [] if self.plan.probes is None else [row for row in rows if not forward.before[row]]
        if not begin and (newest is None or newest >= count):
            return Observed(tier=True)
        looked = torch.zeros(len(rows), count, dtype=torch.float32)
        looked[:, -(newest or count) :] = 1
        for row in begin:
            looked[row - rows.start] = 0
            looked[row - rows.start, self.prompt_probes(row, count, self._ids(forward, row))] = 1
        return Observed(True, upload(looked, looked.dtype, device)[:, :, None])

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention as in `TieredStore`; for `FastGen` it also chooses a policy for each KV head of a row that begins."""
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
        """Which of the new tokens of rows of equal length are special: bool `[len(rows), 1, n]`. ValueError without token ids."""
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
        """The mass as in `TieredStore`, summed over all KV heads where they share one set."""
        parts = super().seen_by(rows, count)
        if not self.plan.shared_across_heads:
            return parts
        held, fresh = (part.sum(1, keepdim=True).expand_as(part) for part in parts)
        return held, fresh

    def observed(self, forward: Forward, rows: list[int], positions: Tensor) -> tuple[Tensor, Tensor]:
        """What a forward adds to `mass` of held tokens, and the `mass` of the new ones at `positions [len(rows), 1, n]`, for
        rows of equal
        length: `[len(rows), numbers x kv_heads, slots or n]` each."""
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
        seen = torch.arange(count, 0, -1, device=fresh.device)[None]  # a token is seen from its own query on
        if begins and self.plan.probes is not None:
            of_rows = torch.stack([self._seen_in_prompt(forward, row, count) for row in rows])
            seen = upload(of_rows, torch.int64, fresh.device)
        numbers = torch.full_like(held, count), seen[:, None].expand_as(fresh).to(fresh.dtype)
        return torch.cat([held, numbers[0]], 1), torch.cat([fresh, numbers[1]], 1)

    def _seen_in_prompt(self, forward: Forward, row: int, count: int) -> Tensor:
        """How many probes see each token of a prompt, those at its position and later: int64 `[count]` on the host."""
        probes = self.shown.probes.get(row)
        if probes is None:
            probes = self.prompt_probes(row, count, self._ids(forward, row))
        return len(probes) - torch.searchsorted(probes, torch.arange(count))

    def of_numbers(self, index: Tensor) -> Tensor:
        """Converts indices of tokens `[rows, kv_heads, ...]` to indices into `mass [rows, numbers x kv_heads, ...]`."""
        return index if self.numbers == 1 else torch.cat([index] * self.numbers, 1) if self.numbers else index[:, :0]

    def scores(self, mass: Tensor) -> Tensor:
        """The scores of tokens with this `mass [..., numbers x kv_heads, tokens]`: `[..., kv_heads, tokens]`."""
        assert self.saliency is not None
        return self.saliency.scores(mass[..., : self.heads, :], mass[..., -self.heads :, :])

    @abstractmethod
    def _resize(self, slots: int) -> None:
        """Resizes `mass` to `slots` slots."""
