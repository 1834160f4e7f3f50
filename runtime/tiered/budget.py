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

from calib.runtime.device.graph_inputs import upload
from calib.runtime.paging.field import Block
from calib.runtime.paging.pages import TIER_PAGE_TOKENS
from calib.runtime.paging.sequence_state import Forward
from calib.runtime.store import Footprint
from calib.runtime.tiered.budget_scores import BudgetScores
from calib.runtime.tiered.budget_step import BudgetStep
from calib.runtime.tiered.candidates import Candidates
from calib.runtime.tiered.tier import POSITIONS


class BudgetStore(BudgetScores):
    """Which slots tokens take, and which they lose."""

    def graph_key(self, forward: Forward) -> Hashable | None:
        """See `Store.graph_key`: steps in which the budgets of all rows are full, or of none."""
        sizes = [sum(self.tiering.sizes(self.sequences.prompt(row))) for row in range(len(forward.before))]
        full = {held >= size for held, size in zip(forward.before, sizes, strict=True)}
        shapes = self.shapes(forward)
        return None if shapes is None or len(full) > 1 else (shapes, self.mass.shape, full == {True})

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """The new tokens become important, others stop being so."""
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
        positions = forward.tensor("token positions", lambda step: step.before, keys.device)[:, None, None]
        held, fresh = self.observed(forward, rows, positions)
        if self.saliency is not None:
            self.saliency.observe(self.mass[:, :, : held.shape[2]], held)
        positions = positions.expand(-1, self.heads, 1)
        block = self.tiers[0].encode(rows, keys, values, positions)
        if self.tiering.has_ring:
            self._through_ring(step, block, fresh)
        else:
            self._past_ring(step, block, fresh, keys, values, positions)

    def _through_ring(self, step: BudgetStep, block: Block, fresh: Tensor) -> None:
        """The new token, encoded, takes the slot of the one that leaves the ring."""
        top, table = self.tiers[0], self.sequences.tables[0].numbers(self.mass.device).long()
        ring = step.ring[:, None].expand(-1, self.heads)
        target = step.free[:, None].expand(-1, self.heads).clone()
        if step.contested:
            leaving = ring[step.rows]
            lost = leaving
            if self.saliency is not None:
                entering = self.mass[step.rows].gather(2, self.of_numbers(leaving)[..., None])
                lightest, lighter = self._lightest(step, entering)
                lost = torch.where(lighter, leaving, lightest)
            target[step.rows] = lost
            if len(self.tiers) > 1 and step.below is not None:
                self._demote(step, top.pool.read_tokens(*self._locations(table[step.rows], lost)))
        to_device = top.pool.read_tokens(*self._locations(table, ring))
        top.pool.write_tokens(*self._locations(table, target), to_device)
        ring_mass, target_mass = (self.of_numbers(index)[..., None] for index in (ring, target))
        self.mass.scatter_(2, target_mass, self.mass.gather(2, ring_mass))
        top.pool.write_tokens(*self._locations(table, ring), block)
        self.mass.scatter_(2, ring_mass, fresh)

    def _past_ring(
        self, step: BudgetStep, block: Block, fresh: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> None:
        """The new token is heavy at once, or goes, not having been in the tier: from its exact keys and values."""
        top, table = self.tiers[0], self.sequences.tables[0].numbers(self.mass.device).long()
        target = step.free[:, None].expand(-1, self.heads).clone()
        if step.contested:
            entering = fresh[step.rows]
            lightest, lighter = self._lightest(step, entering)
            target[step.rows] = lightest
            held = top.pool.read_tokens(*self._locations(table[step.rows], lightest))
            stays = lighter[..., None, None]
            if len(self.tiers) > 1 and step.below is not None:
                new = keys[step.rows], values[step.rows], positions[step.rows]
                self._demote(step, held, (stays, *new))
            own = self.of_numbers(lightest)[..., None]
            kept = torch.where(self.of_numbers(lighter)[..., None], self.mass[step.rows].gather(2, own), entering)
            fresh = fresh.index_copy(0, step.rows, kept)
            # In the pages' types: what stays is not to be rounded again.
            block = {name: part.to(held[name].dtype) for name, part in block.items()}
            block = {
                name: part.index_copy(0, step.rows, torch.where(stays, held[name], part[step.rows]))
                for name, part in block.items()
            }
        top.pool.write_tokens(*self._locations(table, target), block)
        self.mass.scatter_(2, self.of_numbers(target)[..., None], fresh)

    def _lightest(self, step: BudgetStep, entering: Tensor) -> tuple[Tensor, Tensor]:
        """The slot of the lightest heavy token of each contested row and head, int64 `[contested, kv_heads]`, of equals the
        newest; and whether a token with the mass `entering [contested, numbers x kv_heads, 1]` is no heavier."""
        scores = self.scores(self.mass[step.rows])
        heavy = scores.masked_fill(~step.heavy, torch.inf)
        least = heavy.amin(-1, keepdim=True)
        positions = self._positions(step.contested)[..., : scores.shape[2]].masked_fill(heavy > least, -1)
        return positions.argmax(-1), (self.scores(entering) <= least)[..., 0]

    def _positions(self, rows: list[int]) -> Tensor:
        """Positions of the important tokens of `rows`: int64 `[len(rows), kv_heads, slots]`."""
        numbers = self.sequences.tables[0].numbers(self.mass.device)
        return self.tiers[0].kept_positions(
            numbers if len(rows) == len(numbers) else numbers[upload(rows, torch.int64, numbers.device)]
        )

    def _demote(self, step: BudgetStep, block: Block, new: tuple[Tensor, ...] | None = None) -> None:
        """Decodes a token of every contested row and head and encodes it in the tier below; a `new` one in its place where it says
        so: bool `[contested, kv_heads, 1, 1]`, with keys, values and positions."""
        assert step.below is not None
        lower = self.tiers[1]
        keys, values = self.tiers[0].decode(step.contested, block)
        positions = block[POSITIONS][..., 0].long()
        if new is not None:
            instead, *exact, at = new
            keys, values = (torch.where(instead, a.float(), b) for a, b in zip(exact, (keys, values), strict=True))
            positions = torch.where(instead[..., 0], at, positions)
        again = lower.encode(step.contested, keys, values, positions)
        lower.pool.write_tokens(*step.below, again)

    def _step_of(self, forward: Forward, device: torch.device) -> BudgetStep:
        """The same for every layer; made by the first."""
        key = (BudgetStep, device)
        if key not in forward.readings:
            asked = (self.sequences, self.tiering, len(self.tiers) > 1, self.mass.shape[2])
            forward.readings[key] = BudgetStep.of(forward, *asked, device)
        step: BudgetStep = forward.readings[key]
        return step

    @staticmethod
    def _locations(table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Page number and slot in it, of `slots [rows, kv_heads]` of the rows whose pages are `table [rows, pages]`."""
        return table.gather(1, slots // TIER_PAGE_TOKENS), slots % TIER_PAGE_TOKENS

    def _take_in(self, rows: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Any number of tokens of rows of equal length, `[len(rows), kv_heads, n, D]`: selects heavy tokens anew."""
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        heavy, recent = self.tiering.sizes(self.sequences.prompt(rows[0]))
        if not before:
            for role, tokens in (("keys", keys), ("values", values)):
                for tier in (None, *range(len(self.tiers))):
                    self.measure(rows, role, tokens, tier)
        arrival = self._arrival(rows, min(before, heavy + recent), forward, keys, values)
        # By position, so that a stable sort leaves ties to the earlier token; recent tokens are the last in that order.
        order = arrival.positions.argsort(-1)[..., : arrival.positions.shape[-1] - min(after, recent)]
        ranked = order
        if self.saliency is not None:
            ranked = order.gather(
                2, self.scores(arrival.mass).gather(2, order).argsort(dim=-1, descending=True, stable=True)
            )
        chosen, lost = (part.sort(-1).values for part in (ranked[..., :heavy], ranked[..., heavy:]))
        if lost.shape[-1] and len(self.tiers) > 1:
            self._demote_many(arrival, lost, self.sequences.held(rows[0], before)[1])
        at = torch.tensor(rows, device=keys.device)
        mass = self.mass[at]
        if chosen.shape[-1]:
            self.tiers[0].write_block(rows, self.sequences.tables[0], recent, self._kept(arrival, chosen))
            mass[:, :, recent : recent + chosen.shape[-1]] = arrival.mass.gather(2, self.of_numbers(chosen))
        if recent:
            self._fill_ring(arrival, range(max(0, after - recent), after), recent, mass)
        self.mass[at] = mass

    def _arrival(self, rows: list[int], slots: int, forward: Forward, keys: Tensor, values: Tensor) -> Candidates:
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        positions = torch.arange(before, after, device=keys.device).expand(len(rows), 1, -1)
        held, fresh = self.observed(forward, rows, positions)
        earlier = self.mass[rows][:, :, :slots]
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
        keys, values = arrival.new(lost, arrival.keys), arrival.new(lost, arrival.values)
        if arrival.slots:  # those that lay in the important tier are decoded
            held = {name: arrival.old(lost, part) for name, part in arrival.held.items()}
            is_new = arrival.is_new(lost)
            old_keys, old_values = self.tiers[0].decode(arrival.rows, held)
            keys, values = torch.where(is_new, keys.float(), old_keys), torch.where(is_new, values.float(), old_values)
        positions = arrival.positions.gather(2, lost)
        self.tiers[1].write(arrival.rows, self.sequences.tables[1], first, keys, values, positions)

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
            positions = arrival.positions[:, :, arrival.slots :][:, :, part]
            self.tiers[0].write(arrival.rows, self.sequences.tables[0], position % size, keys, values, positions)
            position = stop

    def _held(self, rows: list[int], slots: int) -> Block:
        """The important tier's first `slots` slots as they are: `[len(rows), kv_heads, slots, width]`."""
        if not slots:
            return {}
        numbers = self.sequences.tables[0].numbers(self.mass.device)[rows]
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
