"""A budget of important tokens; whoever falls out of it moves one tier down, or out (H2O, MiKV, TOVA).

Slots of the important tier: a ring of the `recent` newest tokens (token t in slot t % recent), shared by all heads, and
behind it the `heavy` ones, each head its own. When a token arrives, the one that leaves the ring takes the place of the
lightest heavy token or, being lighter, goes itself. Without a ring (`recent` is 0) that is the new token, which then is never in
the tier. Bits never change inside the tier: they are moved. What a token weighs is said by the plan's saliency; where all KV heads
share one set, each of them has the mass of all, so that all choose alike.
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
    """Which slots tokens take, and which they lose."""

    def graph_key(self, forward: Forward) -> Hashable | None:
        """See `Store.graph_key`: steps in which the budgets of all rows are full, or of none."""
        shapes, tiers = self.shapes(forward), self.sequences.slots(forward)[0].tiers
        alike = tiers.count(tiers[0]) == len(tiers)
        return (shapes, self.mass.shape, tiers[0]) if alike and shapes is not None else None

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """The new tokens become important, others stop being so."""
        if self.extremes:
            self.settle()
        self._resize(self._slots())
        if forward.width == 1 and forward.columns is None and all(forward.before):
            self._step(forward, keys, values)
        elif forward.width:  # of drafts perhaps none was kept
            for rows in self.sequences.equal_length_groups(forward):
                self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))
        self.shown.clear()

    def _step(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """One token for each row, all rows at once: what `_take_in` does, without a sort."""
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
        """The new token, encoded, takes the slot of the one that leaves the ring."""
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
        """The new token is heavy at once, or goes, not having been in the tier: from its exact keys and values."""
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
            # In the pages' types: what stays is not to be rounded again.
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
        """Encodes what the contested rows have `lost`, a token of every row and head, in the tier below, if there is one; a `new`
        one in its place where it says so: bool `[rows, kv_heads, 1, 1]`, with keys, values and positions."""
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
        """The same for every layer; made by the first."""
        key = (BudgetStep, device)
        if key not in forward.readings:
            forward.readings[key] = BudgetStep.of(forward, self.sequences, self.tiering, len(self.tiers) > 1, device)
        step: BudgetStep = forward.readings[key]
        return step

    def _take_in(self, rows: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Any number of tokens of rows of equal length, `[len(rows), kv_heads, n, D]`: selects heavy tokens anew."""
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        heavy, recent = self.tiering.sizes(self.sequences.prompt(rows[0]))
        if not before:
            for role, tokens in (("keys", keys), ("values", values)):
                for tier in (None, *range(len(self.tiers))):
                    self.measure(rows, role, tokens, tier)
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
        """The `heavy` candidates with the highest scores, earlier ones where they tie, and those that lose to them: int64
        `[rows, kv_heads, m]`, rising. The `recent` newest are in neither."""
        count = arrival.positions.shape[-1] - recent
        heavy = min(heavy, count)
        # By position; new tokens alone come in that order, and recent ones are the last in it.
        order = arrival.positions.argsort(-1)[..., :count] if arrival.slots else None
        if self.saliency is None:  # the earliest
            scores = torch.zeros(*arrival.positions.shape[:2], count, device=arrival.positions.device)
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
        """Candidates `lost [rows, kv_heads, m]` go to slots `first` ... of the tier below."""
        keys, values, order = arrival.keys, arrival.values, None if arrival.slots else lost
        if arrival.slots:  # those that lay in the important tier are decoded
            held = {name: arrival.old(lost, part) for name, part in arrival.held.items()}
            is_new = arrival.is_new(lost)
            old_keys, old_values = self.tiers[0].decode(arrival.rows, held)
            keys = torch.where(is_new, arrival.new(lost, keys).float(), old_keys)
            values = torch.where(is_new, arrival.new(lost, values).float(), old_values)
        positions = arrival.positions.gather(2, lost)
        runs = self.sequences.tables[1].runs(arrival.rows, first)
        self.tiers[1].write(arrival.rows, runs, keys, values, positions, order=order)

    def _kept(self, arrival: Candidates, chosen: Tensor) -> Block:
        """Candidates `chosen [rows, kv_heads, m]` as the important tier holds them: old ones bit for bit."""
        keys, values = arrival.new(chosen, arrival.keys), arrival.new(chosen, arrival.values)
        block = self.tiers[0].encode(arrival.rows, keys, values, arrival.positions.gather(2, chosen))
        if not arrival.slots:
            return block
        is_new = arrival.is_new(chosen)
        return {
            name: torch.where(is_new, part, arrival.old(chosen, arrival.held[name])) for name, part in block.items()
        }

    def _fill_ring(self, arrival: Candidates, recent: range, size: int, mass: Tensor) -> None:
        """The positions `recent` lie in their ring slots: those held already where they were, with their `mass`."""
        staying = torch.arange(recent.start, max(recent.start, arrival.before), device=mass.device)
        position = recent.start + len(staying)
        mass[:, :, staying % size] = arrival.mass[:, :, staying % size]
        arrived = torch.arange(position, recent.stop, device=mass.device)
        mass[:, :, arrived % size] = arrival.mass[:, :, arrival.slots + arrived - arrival.before]
        while position < recent.stop:  # twice at most: the ring's end and its beginning
            stop = min(recent.stop, position + size - position % size)
            part = slice(position - arrival.before, stop - arrival.before)
            keys, values = arrival.keys[:, :, part], arrival.values[:, :, part]
            runs = self.sequences.tables[0].runs(arrival.rows, position % size)
            self.tiers[0].write(arrival.rows, runs, keys, values, position)
            position = stop

    def _held(self, rows: list[int], slots: int) -> Block:
        """The important tier's first `slots` slots as they are: `[len(rows), kv_heads, slots, width]`."""
        if not slots:
            return {}
        numbers = self.sequences.tables[0].numbers(self.mass.device)[row_index(rows, self.mass.device)]
        return {
            name: tensor[numbers].transpose(1, 2).flatten(2, 3)[:, :, :slots]
            for name, tensor in self.tiers[0].pool.tensors.items()
        }

    def _slots(self) -> int:
        """Slots of whole pages that the important tier of any row uses."""
        used = [self.sequences.held(row, length)[0] for row, length in enumerate(self.sequences.lengths)]
        return -(-max(used, default=0) // TIER_PAGE_TOKENS) * TIER_PAGE_TOKENS

    def _resize(self, slots: int) -> None:
        if slots != self.mass.shape[2]:
            self.mass = torch.nn.functional.pad(self.mass, (0, slots - self.mass.shape[2]))

    def fit_rows(self) -> None:
        """The mass."""
        self._resize(self._slots())

    def footprint(self) -> Footprint:
        """Also the mass."""
        weight = super().footprint()
        rows = len(self.sequences.lengths)
        weight.kinds["saliency"] += rows * self.numbers * self.heads * self._slots() * 4
        if "policies" in self.of_rows:
            weight.kinds["saliency"] += rows * self.heads
        return weight

    def growth(self) -> list[float]:
        """Everything goes one tier down in the end."""
        return [0.0, 1.0]
