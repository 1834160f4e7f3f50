"""Scores of the tokens in chunks: which queries count, and what is kept of the attention that tokens get."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from calib.kernels.upload import upload
from calib.runtime.attend.attention_stats import ChunkWeights, MassSlots, Observed
from calib.runtime.paging.forward import Forward
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.store import LayerContext
from calib.runtime.tiered.chunk_changes import ChunkChanges
from calib.runtime.tiered.chunk_probes import ChunkProbes
from calib.runtime.tiered.probe_rows import LayerProbes
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.store import TieredStore


class ChunkScores(TieredStore):
    """`mass [rows, kv_heads, slots]` float32: what probe queries within the incomplete chunk gave to the tokens in the window.

    Its slots are those of the window; it has none without a saliency.
    """

    of_rows = ("mass",)

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        super().__init__(plan, keys, values, sequences, context)
        self.tiering: RatioTiers = plan.tiering
        own = LayerProbes(plan.probes, self.rng)
        self.probes = ChunkProbes(own, self.tiering)
        if self.observes:
            sequences.probe_rows.add(context.layer, own)
        self.mass = torch.zeros(keys.shape[0], self.heads, self._mass_slots, dtype=torch.float32, device=keys.device)

    @property
    def _mass_slots(self) -> int:
        return self.tiering.first(0) if self.observes else 0

    def seen_by(self, rows: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Mass as in `TieredStore`, with 0 for the sinks, which are never ranked."""
        held, fresh = super().seen_by(rows, count)
        if self.tiering.sinks:
            held[:, :, : self.tiering.sinks].zero_()
        return held, fresh

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """The probes of a prompt, int64 on the host (`ChunkProbes.of_prompt`)."""
        return self.probes.of_prompt(length, ids)

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """Observes probe queries, each on the tokens of its own chunk."""
        if forward.of_block:  # probes or not: what the first layer computes is shared by all
            assert self.windows is not None
            found = self._watched(forward, rows, self.windows[0].tokens.shape[2], device)
            return found if forward.graph_inputs is not None or any(self._are_probes(forward, rows)) else None
        if forward.width == 1 and all(forward.before[rows.start : rows.stop]):
            one_each = self._are_probes(forward, rows)
            if not any(one_each):
                return None
            if all(one_each):
                return Observed(tier=False, into=self._into(forward, rows, device))
            return self._watched(forward, rows, self.sequences.most_exact(forward, rows), device)
        spans = [(forward.before[row], forward.after[row], self.sequences.prompt(row)) for row in rows]
        probes = [self.probes.among(*span, self._ids(forward, row)) for row, span in zip(rows, spans, strict=True)]
        if not any(map(any, probes)):
            return None
        width = max(self.tiering.exact(before, prompt) for before, _, prompt in spans)
        chunks = torch.full((len(rows), width + len(probes[0])), -1)
        for own, (before, after, prompt) in zip(chunks, spans, strict=True):
            exact = self.tiering.exact(before, prompt)  # sinks get no mass, whichever their chunk
            starts = torch.tensor([self.tiering.chunk_of(p, prompt).start for p in range(before - exact, after)])
            own[:exact], own[width:] = starts[:exact], starts[exact:]
        return Observed(
            False, ChunkWeights(upload(chunks, torch.int64, device), upload(torch.tensor(probes), torch.bool, device))
        )

    def _watched(self, forward: Forward, rows: range, slots: int, device: torch.device) -> Observed:
        """Observes the window and the new token, in the rows whose one query is a probe."""
        probe_rows, key = self.sequences.probe_rows, ("watched", rows, slots, device)
        if key not in forward.readings:  # for every layer, computed by the first
            flags = forward.tensor(
                f"probes among {rows}", lambda step: b"".join(self._probes_of_step(step, rows)), device, torch.uint8
            )
            of_layers = flags.view(len(rows), len(probe_rows), 1, 1).transpose(0, 1)
            forward.readings[key] = of_layers.expand(-1, -1, -1, slots + 1)
        weights = forward.readings[key][probe_rows.number_of(self.context.layer)]
        return Observed(False, weights, self._into(forward, rows, device))

    def _into(self, forward: Forward, rows: range, device: torch.device) -> MassSlots | None:
        """The mass slots to which the kernel adds a step's mass at once. None where the step completes a chunk of any of the
        `rows`: that chunk is encoded together with its mass."""
        key = ("slots of new tokens", rows, device)
        if key not in forward.readings:  # the same for every layer
            forward.readings[key] = ChunkChanges.of(forward, self.sequences, self.tiering, device).slots_of(rows)
        slots = forward.readings[key]
        if slots is None:
            return None
        mass = self.mass if len(rows) == len(self.mass) else self.mass[rows.start : rows.stop]
        return MassSlots(mass, self.tiering.sinks, slots)

    def _are_probes(self, step: Forward, rows: range) -> list[int]:
        """For each of the `rows` 1 if its one new query is a probe of this layer, else 0."""
        number = self.sequences.probe_rows.number_of(self.context.layer)
        return [of_layers[number] for of_layers in self._probes_of_step(step, rows)]

    def _probes_of_step(self, step: Forward, rows: range) -> list[bytes]:
        """For each of the `rows` one byte per layer: 1 if its one new query is a probe."""
        key = ("probes", rows)
        if key not in step.readings:  # computed by the first layer
            before, prompts, own = step.before, self.sequences.prompts, slice(rows.start, rows.stop)
            tokens = zip(before[own], prompts[own], strict=True)
            step.readings[key] = self.sequences.probe_rows.at(tokens, self.tiering.chunk_of)
        found: list[bytes] = step.readings[key]
        return found

    def branch(self, forward: Forward) -> Hashable:
        """As `Store.branch`: whether any row's query is a probe."""
        if not self.observes:
            return False
        if "watching layers" not in forward.readings:  # computed by the first layer that asks
            of_rows = self._probes_of_step(forward, range(len(forward.before)))
            forward.readings["watching layers"] = [any(own) for own in zip(*of_rows, strict=True)]
        found: bool = forward.readings["watching layers"][self.sequences.probe_rows.number_of(self.context.layer)]
        return found

    def scores(self, rows: list[int], forward: Forward, chunks: list[range], mass: Tensor | None) -> Tensor | None:
        """The scores of the tokens of one chunk of each row from their `mass [len(rows), kv_heads, n]`, in the same shape; None
        without a saliency, where all tokens are in one tier."""
        if mass is None or self.saliency is None:
            return None
        if self.plan.shared_across_heads:
            mass = mass.sum(1, keepdim=True).expand_as(mass)
        return self.saliency.scores(mass, self._seeing(rows, forward, chunks, mass.device))

    def _seeing(self, rows: list[int], forward: Forward, chunks: list[range], device: torch.device) -> Tensor:
        """How many probes see each token of the chunks: int64 `[len(rows) or 1, 1, n]`."""
        # Rows of equal length have the same probe positions, unless these depend on token ids.
        asked = rows if forward.ids is not None or len(set(chunks)) > 1 else rows[:1]
        observed = self.shown.probes
        seen = [
            self.probes.seeing(chunk, self.sequences.prompt(row), self._ids(forward, row), observed.get(row))
            for row, chunk in zip(asked, chunks, strict=False)
        ]
        return upload(torch.stack(seen), torch.int64, device)[:, None]
