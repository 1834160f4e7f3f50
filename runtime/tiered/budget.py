"""A budget of important tokens; whoever falls out of it moves one tier down, or out (H2O, MiKV).

Slots of the important tier: a ring of the `recent` newest tokens (token t in slot t % recent), shared by all heads, and
behind it the `heavy` ones, each head its own. When a token arrives, the one that leaves the ring takes the place of the
lightest heavy token or, being lighter, goes itself. Bits never change inside the tier: they are moved.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calib.runtime.numbers import upload
from calib.runtime.pages import TIER_PAGE_TOKENS
from calib.runtime.rows import Forward
from calib.runtime.stages.contract import Block
from calib.runtime.stages.tiering import HeavyRecent
from calib.runtime.store import Footprint, Place
from calib.runtime.tiered.arrival import Arrival
from calib.runtime.tiered.attend import Watch
from calib.runtime.tiered.rows import TieredRows
from calib.runtime.tiered.store import TieredStore
from calib.runtime.tiered.tier import POSITIONS


class _Step(NamedTuple):
    """One token for each row.

    `ring` is its slot, `free` where the token that leaves the ring goes while slots are free, int64 `[rows]`. The budget
    of the `contested` rows is full (`rows` on the device): they contest for the slots `heavy`, bool `[contested, 1,
    slots]`, and who loses goes to page and slot `below`.
    """

    ring: Tensor
    free: Tensor
    contested: list[int]
    rows: Tensor
    heavy: Tensor
    below: tuple[Tensor, Tensor] | None


class BudgetStore(TieredStore):
    """`mass [rows, kv_heads, slots]` float32: attention that each important token has got since it came."""

    of_rows = ("mass",)

    def __init__(self, plan: Any, keys: Tensor, values: Tensor, rows: TieredRows, place: Place) -> None:
        super().__init__(plan, keys, values, rows, place)
        self.tiering: HeavyRecent = plan.tiering
        self.mass = torch.zeros(keys.shape[0], self.heads, 0, device=keys.device)

    @property
    def needs_positions(self) -> bool:
        """Where scores tie the earlier token stays."""
        return True

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """Every query counts."""
        return torch.arange(length)

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Watch | None:
        """Every query counts, on the important tier and the new tokens."""
        return Watch(tier=True)

    def block(self, forward: Forward) -> Hashable | None:
        """See `Store.block`: steps in which the budgets of all rows are full, or of none."""
        sizes = [sum(self.tiering.sizes(self.rows.prompt(row))) for row in range(len(forward.before))]
        full = {held >= size for held, size in zip(forward.before, sizes, strict=True)}
        shapes = self.shapes(forward)
        return None if shapes is None or len(full) > 1 else (shapes, self.mass.shape, full == {True})

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """The new tokens become important, others stop being so."""
        self._resize(self._slots())
        if forward.width == 1 and forward.columns is None and all(forward.before):
            self._step(forward, keys, values)
        elif forward.width:  # of drafts perhaps none was kept
            for rows in self.rows.alike(forward):
                self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))
        self.shown.clear()

    def _step(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """One token for each row, all rows at once: what `_take_in` does, without a sort."""
        rows = list(range(len(forward.before)))
        step = self._step_of(forward, keys.device)
        held, fresh = self.seen_by(rows, 1)
        self.mass[:, :, : held.shape[2]] += held
        top, table = self.tiers[0], self.rows.tables[0].numbers(keys.device).long()
        ring = step.ring[:, None].expand(-1, self.heads)
        target = step.free[:, None].expand(-1, self.heads).clone()
        if step.contested:
            leaving = ring[step.rows]
            lost = self._lightest(step, leaving)
            target[step.rows] = lost
            if len(self.tiers) > 1 and step.below is not None:
                block = top.pool.read_tokens(*self._places(table[step.rows], lost))
                self._demote(step, block)
        moved = top.pool.read_tokens(*self._places(table, ring))
        top.pool.write_tokens(*self._places(table, target), moved)
        self.mass.scatter_(2, target[..., None], self.mass.gather(2, ring[..., None]))
        places = forward.tensor("places", lambda step: step.before, keys.device)[:, None, None].expand(
            -1, self.heads, 1
        )
        top.pool.write_tokens(*self._places(table, ring), top.encode(rows, keys, values, places))
        self.mass.scatter_(2, ring[..., None], fresh)

    def _lightest(self, step: _Step, leaving: Tensor) -> Tensor:
        """The slot that each contested row and head loses, int64 `[contested, kv_heads]`: of equals the newest token's."""
        mass = self.mass[step.rows]
        heavy = mass.masked_fill(~step.heavy, torch.inf)
        least = heavy.amin(-1, keepdim=True)
        own = mass.gather(2, leaving[..., None])
        places = self._positions(step.contested)[..., : mass.shape[2]].masked_fill(heavy > least, -1)
        return torch.where(own <= least, leaving[..., None], places.argmax(-1, keepdim=True))[..., 0]

    def _positions(self, rows: list[int]) -> Tensor:
        """Positions of the important tokens of `rows`: int64 `[len(rows), kv_heads, slots]`."""
        numbers = self.rows.tables[0].numbers(self.mass.device)
        return self.tiers[0].kept_places(
            numbers if len(rows) == len(numbers) else numbers[upload(rows, torch.int64, numbers.device)]
        )

    def _demote(self, step: _Step, block: Block) -> None:
        """Decodes a token of every contested row and head and encodes it in the tier below."""
        assert step.below is not None
        lower = self.tiers[1]
        keys, values = self.tiers[0].decode(step.contested, block)
        again = lower.encode(step.contested, keys, values, block[POSITIONS][..., 0].long())
        lower.pool.write_tokens(*step.below, again)

    def _step_of(self, forward: Forward, device: torch.device) -> _Step:
        """The same for every layer; made by the first."""
        key = (_Step, device)
        if key not in forward.readings:
            forward.readings[key] = self._made(forward, device)
        step: _Step = forward.readings[key]
        return step

    def _made(self, forward: Forward, device: torch.device) -> _Step:
        sizes = [self.tiering.sizes(self.rows.prompt(row)) for row in range(len(forward.before))]

        def ring(step: Forward) -> list[int]:
            return [length % recent for length, (_, recent) in zip(step.before, sizes, strict=True)]

        def free(step: Forward) -> list[int]:
            # A ring that is not full takes the token where it stands; then the heavy slots fill up, in order.
            return [
                own if length < recent or length >= heavy + recent else length
                for own, length, (heavy, recent) in zip(ring(step), step.before, sizes, strict=True)
            ]

        def below_at(part: int, step: Forward) -> list[int]:
            held = (self.rows.held(row, step.before[row])[1] for row in contested)
            return [self.rows.tables[1].place(row, count)[part] for row, count in zip(contested, held, strict=True)]

        contested = [
            row for row, (length, size) in enumerate(zip(forward.before, sizes, strict=True)) if length >= sum(size)
        ]
        slots = torch.arange(self.mass.shape[2], device=device)
        first = forward.tensor("recent", lambda _: [sizes[row][1] for row in contested], device)[:, None, None]
        last = forward.tensor("budget", lambda _: [sum(sizes[row]) for row in contested], device)[:, None, None]
        below = None
        if contested and len(self.tiers) > 1:
            pages, places = (
                forward.tensor(name, partial(below_at, part), device)
                for part, name in enumerate(("pages below", "slots below"))
            )
            below = pages, places
        index = forward.tensor("contested", lambda _: contested, device)
        return _Step(
            forward.tensor("ring", ring, device),
            forward.tensor("free", free, device),
            contested,
            index,
            (slots >= first) & (slots < last),
            below,
        )

    @staticmethod
    def _places(table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Page number and slot in it, of `slots [rows, kv_heads]` of the rows whose pages are `table [rows, pages]`."""
        return table.gather(1, slots // TIER_PAGE_TOKENS), slots % TIER_PAGE_TOKENS

    def _take_in(self, rows: list[int], forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Any number of tokens of rows that are alike, `[len(rows), kv_heads, n, D]`: selects heavy tokens anew."""
        before, after = forward.before[rows[0]], forward.after[rows[0]]
        heavy, recent = self.tiering.sizes(self.rows.prompt(rows[0]))
        if not before:
            for role, tokens in (("keys", keys), ("values", values)):
                for tier in (None, *range(len(self.tiers))):
                    self.measure(rows, role, tokens, tier)
        arrival = self._arrival(rows, min(before, heavy + recent), before, after, keys, values)
        # By position, so that a stable sort leaves ties to the earlier token; recent tokens are the last in that order.
        order = arrival.places.argsort(-1)[..., : arrival.places.shape[-1] - min(after, recent)]
        ranked = order.gather(2, arrival.mass.gather(2, order).argsort(dim=-1, descending=True, stable=True))
        chosen, lost = (part.sort(-1).values for part in (ranked[..., :heavy], ranked[..., heavy:]))
        if lost.shape[-1] and len(self.tiers) > 1:
            self._demote_many(arrival, lost, self.rows.held(rows[0], before)[1])
        at = torch.tensor(rows, device=keys.device)
        mass = self.mass[at]
        if chosen.shape[-1]:
            self.tiers[0].write_block(rows, self.rows.tables[0], recent, self._kept(arrival, chosen))
            mass[:, :, recent : recent + chosen.shape[-1]] = arrival.mass.gather(2, chosen)
        self._fill_ring(arrival, range(max(0, after - recent), after), recent, mass)
        self.mass[at] = mass

    def _arrival(self, rows: list[int], slots: int, before: int, after: int, keys: Tensor, values: Tensor) -> Arrival:
        held, fresh = self.seen_by(rows, after - before)
        earlier = self.mass[rows][:, :, :slots]
        earlier[:, :, : held.shape[2]] += held[:, :, :slots]
        places = torch.arange(before, after, device=keys.device).expand(len(rows), self.heads, -1)
        if slots:
            places = torch.cat([self._positions(rows)[..., :slots], places], -1)
        return Arrival(
            rows, slots, before, keys, values, torch.cat([earlier, fresh], -1), places, self._held(rows, slots)
        )

    def _demote_many(self, arrival: Arrival, lost: Tensor, first: int) -> None:
        """Candidates `lost [rows, kv_heads, m]` go to slots `first` ... of the tier below."""
        keys, values = arrival.new(lost, arrival.keys), arrival.new(lost, arrival.values)
        if arrival.slots:  # those that lay in the important tier are decoded
            held = {name: arrival.old(lost, part) for name, part in arrival.held.items()}
            is_new = arrival.is_new(lost)
            old_keys, old_values = self.tiers[0].decode(arrival.rows, held)
            keys, values = torch.where(is_new, keys.float(), old_keys), torch.where(is_new, values.float(), old_values)
        places = arrival.places.gather(2, lost)
        self.tiers[1].write(arrival.rows, self.rows.tables[1], first, keys, values, places)

    def _kept(self, arrival: Arrival, chosen: Tensor) -> Block:
        """Candidates `chosen [rows, kv_heads, m]` as the important tier holds them: old ones bit for bit."""
        keys, values = arrival.new(chosen, arrival.keys), arrival.new(chosen, arrival.values)
        block = self.tiers[0].encode(arrival.rows, keys, values, arrival.places.gather(2, chosen))
        if not arrival.slots:
            return block
        is_new = arrival.is_new(chosen)
        return {
            name: torch.where(is_new, part, arrival.old(chosen, arrival.held[name])) for name, part in block.items()
        }

    def _fill_ring(self, arrival: Arrival, recent: range, size: int, mass: Tensor) -> None:
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
            places = arrival.places[:, :, arrival.slots :][:, :, part]
            self.tiers[0].write(arrival.rows, self.rows.tables[0], position % size, keys, values, places)
            position = stop

    def _held(self, rows: list[int], slots: int) -> Block:
        """The important tier's first `slots` slots as they are: `[len(rows), kv_heads, slots, width]`."""
        if not slots:
            return {}
        numbers = self.rows.tables[0].numbers(self.mass.device)[rows]
        return {
            name: tensor[numbers].transpose(1, 2).flatten(2, 3)[:, :, :slots]
            for name, tensor in self.tiers[0].pool.tensors.items()
        }

    def _slots(self) -> int:
        """Slots of whole pages that the important tier of any row uses."""
        used = [self.rows.held(row, length)[0] for row, length in enumerate(self.rows.lengths)]
        return -(-max(used, default=0) // TIER_PAGE_TOKENS) * TIER_PAGE_TOKENS

    def _resize(self, slots: int) -> None:
        if slots != self.mass.shape[2]:
            self.mass = torch.nn.functional.pad(self.mass, (0, slots - self.mass.shape[2]))

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """The mass of the rows that there are now."""
        super().permute(sources, kept)
        self._resize(self._slots())

    def footprint(self) -> Footprint:
        """Also the mass."""
        weight = super().footprint()
        weight.kinds["saliency"] += len(self.rows.lengths) * self.heads * self._slots() * 4
        return weight

    def growth(self) -> list[float]:
        """Everything goes one tier down in the end."""
        return [0.0, 1.0]
