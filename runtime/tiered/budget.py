"""A budget of important tokens; whoever falls out of it moves one tier down, or out (H2O, MiKV).

Slots of the important tier: a ring of the `recent` newest tokens (token t in slot t % recent), shared by all heads, and
behind it the `heavy` ones, each head its own. When a token arrives, the one that leaves the ring takes the place of the
lightest heavy token or, being lighter, goes itself. Bits never change inside the tier: they are moved.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from calib.runtime.pages import TIER_PAGE_TOKENS
from calib.runtime.rows import Forward
from calib.runtime.stages.contract import Block
from calib.runtime.stages.tiering import HeavyRecent
from calib.runtime.store import Footprint, Place
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

    needs_positions = True

    def __init__(self, plan: Any, keys: Tensor, values: Tensor, rows: TieredRows, place: Place) -> None:
        super().__init__(plan, keys, values, rows, place)
        self.tiering: HeavyRecent = plan.tiering
        self.mass = torch.zeros(keys.shape[0], self.heads, 0, device=keys.device)

    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """Every query counts."""
        return torch.arange(length)

    def watch(self, forward: Forward, rows: range, device: torch.device) -> Watch | None:
        """Every query counts, on the important tier and the new tokens."""
        return Watch(tier=True)

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """The new tokens become important, others stop being so."""
        self._resize(self._slots())
        if forward.width == 1 and forward.columns is None and all(forward.before):
            self._step(forward, keys, values)
        else:
            for rows in self.rows.alike(forward):
                self._take_in(rows, forward, forward.real(keys, rows), forward.real(values, rows))
        self.seen.clear()
        self.queries.clear()

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
        places = forward.tensor("places", forward.before, keys.device)[:, None, None].expand(-1, self.heads, 1)
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
        return self.tiers[0].places(numbers if len(rows) == len(numbers) else numbers[rows])

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
        ring = [length % recent for length, (_, recent) in zip(forward.before, sizes, strict=True)]
        # A ring that is not full takes the token where it stands; then the heavy slots fill up, in order.
        free = [
            own if length < recent or length >= heavy + recent else length
            for own, length, (heavy, recent) in zip(ring, forward.before, sizes, strict=True)
        ]
        contested = [
            row for row, (length, size) in enumerate(zip(forward.before, sizes, strict=True)) if length >= sum(size)
        ]
        slots = torch.arange(self.mass.shape[2], device=device)
        first = forward.tensor("recent", [sizes[row][1] for row in contested], device)[:, None, None]
        last = forward.tensor("budget", [sum(sizes[row]) for row in contested], device)[:, None, None]
        below = None
        if contested and len(self.tiers) > 1:
            at = [self.rows.tables[1].place(row, self.rows.held(row, forward.before[row])[1]) for row in contested]
            pages, places = map(list, zip(*at, strict=True))
            below = forward.tensor("pages below", pages, device), forward.tensor("slots below", places, device)
        index = forward.tensor("contested", contested, device)
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
        before, after, prompt = forward.before[rows[0]], forward.after[rows[0]], self.rows.prompt(rows[0])
        heavy, recent = self.tiering.sizes(prompt)
        slots, new = min(before, heavy + recent), after - before
        held, fresh = self.seen_by(rows, new)
        if not before:
            for role, tokens in (("keys", keys), ("values", values)):
                self.measure(rows, role, tokens, None)
                for number in range(len(self.tiers)):
                    self.measure(rows, role, tokens, number)
        earlier = self.mass[rows][:, :, :slots]
        earlier[:, :, : held.shape[2]] += held[:, :, :slots]
        mass = torch.cat([earlier, fresh], -1)
        arriving = torch.arange(before, after, device=keys.device).expand(len(rows), self.heads, -1)
        places = torch.cat([self._positions(rows)[..., :slots], arriving], -1) if slots else arriving
        # Candidates by position, so that a stable sort leaves ties to the earlier token.
        order = places.argsort(-1)
        oldest_recent = max(0, after - recent)
        others = places.shape[-1] - min(after, recent)  # they come first in that order: every recent token is newer
        others_by_mass = mass.gather(2, order[..., :others]).argsort(dim=-1, descending=True, stable=True)
        ranked = order[..., :others].gather(2, others_by_mass)
        chosen, lost = (part.sort(-1).values for part in (ranked[..., :heavy], ranked[..., heavy:]))
        self._move(rows, before, slots, chosen, lost, mass, places, keys, values, oldest_recent, recent)

    def _move(
        self,
        rows: list[int],
        before: int,
        slots: int,
        chosen: Tensor,
        lost: Tensor,
        mass: Tensor,
        places: Tensor,
        keys: Tensor,
        values: Tensor,
        oldest_recent: int,
        recent: int,
    ) -> None:
        """Puts the `chosen` candidates into the heavy slots, the `lost` one tier down, and the newest into the ring.

        Candidates 0 ... `slots` - 1 lie in those slots of the important tier; the others are the new tokens.
        """
        top, table = self.tiers[0], self.rows.tables[0]
        held = self._held_block(rows, slots)
        if lost.shape[-1] and len(self.tiers) > 1:
            first = self.rows.held(rows[0], before)[1]
            own_keys, own_values = (self._gathered(lost - slots, tokens) for tokens in (keys, values))
            if slots:
                index = lost.clamp(max=slots - 1)
                old_keys, old_values = top.decode(
                    rows, {name: self._gathered(index, part) for name, part in held.items()}
                )
                is_new = (lost >= slots)[..., None]
                own_keys, own_values = (
                    torch.where(is_new, new.float(), old)
                    for new, old in ((own_keys, old_keys), (own_values, old_values))
                )
            self.tiers[1].write(rows, self.rows.tables[1], first, own_keys, own_values, places.gather(2, lost))
        if chosen.shape[-1]:
            new_keys, new_values = (self._gathered(chosen - slots, tokens) for tokens in (keys, values))
            new = top.encode(rows, new_keys, new_values, places.gather(2, chosen))
            if slots:
                index, is_new = chosen.clamp(max=slots - 1), (chosen >= slots)[..., None]
                new = {name: torch.where(is_new, part, self._gathered(index, held[name])) for name, part in new.items()}
            top.write_block(rows, table, recent, new)
        at = torch.tensor(rows, device=mass.device)
        kept = self.mass[at]
        kept[:, :, recent : recent + chosen.shape[-1]] = mass.gather(2, chosen)
        # The ring: tokens that stay lie where they lay.
        ring = torch.arange(oldest_recent, before + keys.shape[2], device=mass.device)
        staying = max(0, before - oldest_recent)
        if staying:
            kept[:, :, ring[:staying] % recent] = mass[:, :, ring[:staying] % recent]
        arrived = ring[staying:]
        kept[:, :, arrived % recent] = mass[:, :, slots + arrived - before]
        self.mass[at] = kept
        position, stop = oldest_recent + staying, before + keys.shape[2]
        while position < stop:  # twice at most: the ring's end and its beginning
            count = min(stop - position, recent - position % recent)
            part = slice(position - before, position - before + count)
            columns = places[:, :, slots:][:, :, part]
            top.write(rows, table, position % recent, keys[:, :, part], values[:, :, part], columns)
            position += count

    def _held_block(self, rows: list[int], slots: int) -> Block:
        """The important tier's first `slots` slots as they are: `[len(rows), kv_heads, slots, width]`."""
        if not slots:
            return {}
        numbers = self.rows.tables[0].numbers(self.mass.device)[rows]
        return {
            name: tensor[numbers].transpose(1, 2).flatten(2, 3)[:, :, :slots]
            for name, tensor in self.tiers[0].pool.tensors.items()
        }

    @staticmethod
    def _gathered(index: Tensor, tokens: Tensor) -> Tensor:
        """Tokens `[rows, kv_heads, n, width]` at `index [rows, kv_heads, m]`; an index below 0 takes the first."""
        return tokens.gather(2, index.clamp(min=0)[..., None].expand(-1, -1, -1, tokens.shape[3]))

    def _slots(self) -> int:
        """Slots of whole pages that the important tier of any row uses."""
        used = [self.rows.held(row, length)[0] for row, length in enumerate(self.rows.lengths)]
        return -(-max(used, default=0) // TIER_PAGE_TOKENS) * TIER_PAGE_TOKENS

    def _resize(self, slots: int) -> None:
        if slots != self.mass.shape[2]:
            self.mass = torch.nn.functional.pad(self.mass, (0, slots - self.mass.shape[2]))

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Also the mass."""
        super().permute(sources, kept)
        self.mass = self.mass[sources.to(self.mass.device)]
        self._resize(self._slots())

    def to(self, device: torch.device) -> None:
        """Also the mass."""
        super().to(device)
        self.mass = self.mass.to(device)

    def footprint(self) -> Footprint:
        """Also the mass."""
        weight = super().footprint()
        weight.kinds["saliency"] += len(self.rows.lengths) * self.heads * self._slots() * 4
        return weight

    def growth(self) -> list[float]:
        """Everything goes one tier down in the end."""
        return [0.0, 1.0]
