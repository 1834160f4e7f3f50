"""A store with a budget of important tokens: a token that drops out of it moves one tier down or is evicted (H2O, MiKV, TOVA).

The slots of the important tier begin with a ring of the `recent` newest tokens (token t in slot t % recent), the same for all
heads; behind it are `heavy` slots, which each head fills on its own. When a token arrives, the one that leaves the ring
replaces the heavy token with the lowest score, or drops out itself if its own score is lower. Without a ring (`recent` is 0)
the new token competes at once. Inside the tier encoded tokens are moved, never encoded again. Scores come from the plan's
saliency. Where all KV heads share one set, each gets the sum of their mass, so that all choose the same tokens.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from calib.kernels.heavy_hitters.operation import BudgetSlots, NewToken, enter_ring, lightest
from calib.kernels.top_k.operation import divided
from calib.runtime.device.row_index import row_index
from calib.runtime.paging.field import Block
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.pages import TIER_PAGE_TOKENS
from calib.runtime.store import Footprint
from calib.runtime.tiered.budget_scores import BudgetScores
from calib.runtime.tiered.budget_step import BudgetStep
from calib.runtime.tiered.candidates import Candidates
from calib.runtime.tiered.tier import POSITIONS


class BudgetStore(BudgetScores):
    """Decides which tokens are in the important tier's slots."""

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`; a key only for steps in which the budgets of all rows are full, or of none."""
        shapes, tiers = self.shapes(forward), self.sequences.slots(forward)[0].tiers
        alike = tiers.count(tiers[0]) == len(tiers)
        return (shapes, self.mass.shape, tiers[0]) if alike and shapes is not None else None

    def _store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores the new tokens in the important tier; tokens that drop out of it move down or are evicted."""
        self._resize(self._slots())
        if forward.width == 1 and forward.columns is None and all(forward.before):
            self._step(forward, keys, values)
        elif forward.width:  # 0 where no draft was kept
            for rows in self.sequences.equal_length_groups(forward):
                self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))

    def _step(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores one token for each row, all rows at once: the same as `_take_in`, without sorting."""
        rows = list(range(len(forward.before)))
        step = self._step_of(forward, keys.device)
        positions = forward.tensor("positions to store", lambda step: step.before, keys.device, torch.int32)
        positions = positions[:, None, None]
        seen = self.observed(forward, rows, positions)
        positions = positions.expand(-1, self.heads, -1)
        block = self.tiers[0].encode(rows, keys, values, positions)
        if self.tiering.has_ring:
            self._through_ring(step, block, *seen)
        else:
            self._past_ring(step, block, *seen, keys, values, positions)

    def _through_ring(self, step: BudgetStep, block: Block, shown: Tensor, fresh: Tensor) -> None:
        """Writes the encoded new token into the ring slot of the token that leaves the ring."""
        fields = self.tiers[0].pool.tensors
        rule = None if self.saliency is None else self.saliency.rule
        tokens = [NewToken(field, block[name].to(field.dtype)) for name, field in fields.items()]
        lost = enter_ring(rule, self.mass, shown, fresh, self._budget_slots(step), tokens)
        self._demote(step, dict(zip(fields, lost, strict=True)))

    def _past_ring(
        self,
        step: BudgetStep,
        block: Block,
        shown: Tensor,
        fresh: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
    ) -> None:
        """Stores the new token without a ring: as a heavy token, or one tier down, encoded from its exact keys and values."""
        assert self.saliency is not None
        top, slots = self.tiers[0], self._budget_slots(step)
        self.saliency.observe(self.mass[:, :, : shown.shape[2]], shown)
        target = slots.free[:, None].expand(-1, self.heads)
        if step.contested:
            lightest_slot, lighter = lightest(self.saliency.rule, self.mass, fresh, slots)
            contested = (slots.first < slots.last)[:, None]
            target, stays = torch.where(contested, lightest_slot, target), contested & lighter
            held = top.pool.read_tokens(*slots.locations(target))
            self._demote(step, held, (stays[..., None, None], keys, values, positions))
            own = self.of_numbers(target)[..., None]
            fresh = torch.where(self.of_numbers(stays)[..., None], self.mass.gather(2, own), fresh)
            # In the pages' dtypes: the tokens that stay must not be rounded again.
            block = {
                name: torch.where(stays[..., None, None], held[name], part.to(held[name].dtype))
                for name, part in block.items()
            }
        top.pool.write_tokens(*slots.locations(target), block)
        self.mass.scatter_(2, self.of_numbers(target)[..., None], fresh)

    def _budget_slots(self, step: BudgetStep) -> BudgetSlots:
        table = self.sequences.tables[0].numbers(self.mass.device)
        return BudgetSlots(*step[:4], table, self.tiers[0].pool.tensors[POSITIONS])

    def _positions(self, rows: list[int]) -> Tensor:
        """Positions of the important tokens of `rows`: int64 `[len(rows), kv_heads, slots]`."""
        numbers = self.sequences.tables[0].numbers(self.mass.device)
        return self.tiers[0].kept_positions(
            numbers if len(rows) == len(numbers) else numbers[row_index(rows, numbers.device)]
        )

    def _demote(self, step: BudgetStep, lost: Block, new: tuple[Tensor, ...] | None = None) -> None:
        """Encodes in the tier below, if any, what the contested rows have `lost`, one token for every row and head. `new` is
        (bool mask `[rows, kv_heads, 1, 1]`, keys, values, positions): where the mask is True, the new token is encoded there
        instead."""
        if len(self.tiers) == 1 or step.below is None:
            return
        lost = {name: step.of_contested(part) for name, part in lost.items()}
        keys, values = self.tiers[0].as_held(step.contested, lost)
        positions = lost[POSITIONS][..., 0]
        if new is not None:
            instead, *exact, at = (step.of_contested(part) for part in new)
            keys, values = (
                torch.where(instead, a.float(), b.float()) for a, b in zip(exact, (keys, values), strict=True)
            )
            positions = torch.where(instead[..., 0], at, positions)
        again = self.tiers[1].encode(step.contested, keys, values, positions)
        self.tiers[1].pool.write_tokens(*step.below, again)

    def _step_of(self, forward: Forward, device: torch.device) -> BudgetStep:
        """The `BudgetStep` of a forward; computed by the first layer, the same for all."""
        key = (BudgetStep, device)
        if key not in forward.readings:
            forward.readings[key] = BudgetStep.of(forward, self.sequences, self.tiering, len(self.tiers) > 1, device)
        step: BudgetStep = forward.readings[key]
        return step

    def _take_in(self, rows: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores any number of tokens of rows of equal length, `[len(rows), kv_heads, n, D]`: chooses all heavy tokens again."""
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        heavy, recent = self.tiering.sizes(self.sequences.prompt(rows[0]))
        if not before:
            for role, tokens in (("keys", keys), ("values", values)):
                for tier in (None, *range(len(self.tiers))):
                    self.transforms.measure(self.shown, rows, role, tokens, tier)
        arrival = self._arrival(rows, min(before, heavy + recent), forward, keys, values)
        chosen, lost = self._divided(arrival, heavy, min(after, recent))
        if lost.shape[-1] and len(self.tiers) > 1:
            self._demote_many(arrival, lost, self.sequences.held(rows[0], before)[1])
        index = row_index(rows, keys.device)
        mass = self.mass[index].clone()
        if chosen.shape[-1]:
            self.tiers[0].pool.write_runs(self.sequences.tables[0].runs(rows, recent), self._kept(arrival, chosen))
            mass[:, :, recent : recent + chosen.shape[-1]] = arrival.mass.gather(2, self.of_numbers(chosen))
        if recent:
            self._fill_ring(arrival, range(max(0, after - recent), after), recent, mass)
        self.mass[index] = mass

    def _divided(self, arrival: Candidates, heavy: int, recent: int) -> tuple[Tensor, Tensor]:
        """Splits the candidates, apart from the `recent` newest: the `heavy` ones with the highest scores (earlier ones on
        ties), and the others, which lose. Both int64 `[rows, kv_heads, m]`, ascending by position."""
        count = arrival.positions.shape[-1] - recent
        heavy = min(heavy, count)
        # By position. Without earlier tokens the candidates are in that order already; the recent ones are the last.
        order = arrival.positions.argsort(-1)[..., :count] if arrival.slots else None
        if self.saliency is None:  # locality alone: `heavy` is 0, and every candidate loses
            scores = torch.zeros(
                *arrival.positions.shape[:2], count, dtype=torch.float32, device=arrival.positions.device
            )
        else:
            scores = self.scores(arrival.mass)
            scores = scores[..., :count] if order is None else scores.gather(2, order)
        chosen, lost = divided(scores, [heavy, count - heavy])
        if order is None:
            return chosen, lost
        return order.gather(2, chosen).sort(-1).values, order.gather(2, lost).sort(-1).values

    def _arrival(self, rows: list[int], slots: int, forward: Forward, keys: Tensor, values: Tensor) -> Candidates:
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        positions = torch.arange(before, after, device=keys.device).expand(len(rows), 1, -1)
        held, fresh = self.observed(forward, rows, positions)
        earlier = self.mass[row_index(rows, self.mass.device), :, :slots].clone()
        if self.saliency is not None:
            self.saliency.observe(earlier[:, :, : held.shape[2]], held[:, :, :slots])
        positions = positions.expand(-1, self.heads, -1)
        if slots:
            positions = torch.cat([self._positions(rows)[..., :slots], positions], -1)
        return Candidates(
            rows, slots, before, keys, values, torch.cat([earlier, fresh], -1), positions, self._held(rows, slots)
        )

    def _demote_many(self, arrival: Candidates, lost: Tensor, first: int) -> None:
        """Encodes the candidates `lost [rows, kv_heads, m]` into the slots from `first` on of the tier below."""
        keys, values, order = arrival.keys, arrival.values, None if arrival.slots else lost
        if arrival.slots:  # those already in the important tier are decoded first
            held = {name: arrival.old(lost, part) for name, part in arrival.held.items()}
            is_new = arrival.is_new(lost)
            old_keys, old_values = self.tiers[0].decode(arrival.rows, held)
            keys = torch.where(is_new, arrival.new(lost, keys).float(), old_keys)
            values = torch.where(is_new, arrival.new(lost, values).float(), old_values)
        positions = arrival.positions.gather(2, lost)
        runs = self.sequences.tables[1].runs(arrival.rows, first)
        self.tiers[1].write(arrival.rows, runs, keys, values, positions, order=order)

    def _kept(self, arrival: Candidates, chosen: Tensor) -> Block:
        """The fields of candidates `chosen [rows, kv_heads, m]` in the important tier; tokens already in it keep their bits."""
        keys, values = arrival.new(chosen, arrival.keys), arrival.new(chosen, arrival.values)
        block = self.tiers[0].encode(arrival.rows, keys, values, arrival.positions.gather(2, chosen))
        if not arrival.slots:
            return block
        is_new = arrival.is_new(chosen)
        return {
            name: torch.where(is_new, part, arrival.old(chosen, arrival.held[name])) for name, part in block.items()
        }

    def _fill_ring(self, arrival: Candidates, recent: range, size: int, mass: Tensor) -> None:
        """Fills the ring with the positions `recent`. Tokens already in the ring stay in their slots; `mass` is updated for all."""
        staying = torch.arange(recent.start, max(recent.start, arrival.before), device=mass.device)
        position = recent.start + len(staying)
        mass[:, :, staying % size] = arrival.mass[:, :, staying % size]
        arrived = torch.arange(position, recent.stop, device=mass.device)
        mass[:, :, arrived % size] = arrival.mass[:, :, arrival.slots + arrived - arrival.before]
        while position < recent.stop:  # at most two iterations: the ring's end and its beginning
            stop = min(recent.stop, position + size - position % size)
            part = slice(position - arrival.before, stop - arrival.before)
            keys, values = arrival.keys[:, :, part], arrival.values[:, :, part]
            runs = self.sequences.tables[0].runs(arrival.rows, position % size)
            self.tiers[0].write(arrival.rows, runs, keys, values, position)
            position = stop

    def _held(self, rows: list[int], slots: int) -> Block:
        """The fields of the important tier's first `slots` slots: `[len(rows), kv_heads, slots, width]`."""
        if not slots:
            return {}
        numbers = self.sequences.tables[0].numbers(self.mass.device)[row_index(rows, self.mass.device)]
        return {
            name: tensor[numbers].transpose(1, 2).flatten(2, 3)[:, :, :slots]
            for name, tensor in self.tiers[0].pool.tensors.items()
        }

    def _slots(self) -> int:
        """How many slots, in whole pages, the important tier of the longest row uses."""
        used = [self.sequences.held(row, length)[0] for row, length in enumerate(self.sequences.lengths)]
        return -(-max(used, default=0) // TIER_PAGE_TOKENS) * TIER_PAGE_TOKENS

    def _resize(self, slots: int) -> None:
        if slots != self.mass.shape[2]:
            self.mass = torch.nn.functional.pad(self.mass, (0, slots - self.mass.shape[2]))

    def fit_rows(self) -> None:
        """Resizes the mass."""
        self._resize(self._slots())

    def footprint(self) -> Footprint:
        """Bytes as in `TieredStore`, plus the mass."""
        weight = super().footprint()
        rows = len(self.sequences.lengths)
        weight.kinds["saliency"] += rows * self.numbers * self.heads * self._slots() * 4
        if "policies" in self.of_rows:
            weight.kinds["saliency"] += rows * self.heads
        return weight

    def growth(self) -> list[float]:
        """In the long run every new token pushes one token into the tier below."""
        return [0.0, 1.0]
