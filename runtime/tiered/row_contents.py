"""What a tiered store holds of one row, decoded: keys, values and positions, by tier or in the row's order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from calib.runtime.held_tier import HeldTier
from calib.runtime.rotation import Rotation

if TYPE_CHECKING:
    from calib.runtime.tiered.store import TieredStore


@dataclass(frozen=True)
class RowContents:
    """The tokens of one `row` of a store."""

    store: "TieredStore"
    row: int

    @property
    def length(self) -> int:
        """The row's tokens, evicted ones included."""
        return self.store.sequences.lengths[self.row]

    def counts(self) -> list[int]:
        """How many tokens are in each tier."""
        return self.store.sequences.held(self.row, self.length)

    def positions(self, number: int) -> Tensor:
        """The positions of the tokens in a tier that `knows_positions`: int64 `[kv_heads, count]`."""
        tier, pages, count = self.store.tiers[number], self._pages(number), self.counts()[number]
        found = tier.positions(torch.tensor([pages], dtype=torch.int32, device=tier.pool.device), 0, count)
        if isinstance(found, slice):
            return torch.arange(found.start, found.stop, device=tier.pool.device).expand(self.store.heads, -1)
        return found[0, :, :count]

    def decoded(self) -> list[tuple[Tensor, Tensor]]:
        """Keys after RoPE and values in each tier, float32 `[kv_heads, count, D]`, in the order of slots."""
        found, rotation, row_params = [], self.store.context.rotation, self.store.sequences.row_params
        params = [] if row_params is None else row_params.rows[self.row]
        for number, (tier, count) in enumerate(zip(self.store.tiers, self.counts(), strict=True)):
            keys, values = tier.decoded(self.row, self._pages(number), count, params)
            if count and self.store.plan.before_rope and rotation is not None:
                keys = Rotation.rotated(keys, *rotation.at(self.positions(number)))
            found.append((keys, values))
        return found

    def in_order(self) -> tuple[Tensor, Tensor]:
        """As `Store.read_back`. Tiers without known positions hold tokens in order, one tier after the other."""
        store, tier, at = self.store, self.store.tiers[0], self.store.sequences.sinks
        keys, values = (
            torch.empty(store.heads, self.length, n, dtype=tier.dtype, device=tier.pool.device) for n in store.widths
        )
        for number, held in enumerate(self.decoded()):
            count = held[0].shape[1]
            positions = torch.arange(at, at + count, device=keys.device).expand(store.heads, -1)
            if store.tiers[number].knows_positions:
                positions = self.positions(number)
            for whole, part in zip((keys, values), held, strict=True):
                whole.scatter_(1, positions[..., None].expand_as(part), part.to(whole.dtype))
            at += count
        exact = self._exact_positions().to(keys.device)
        for whole, window in zip((keys, values), store.windows or (), strict=False):
            whole[:, exact] = window.tokens[self.row, :, : len(exact)]
        return keys, values

    def tiers(self) -> list[HeldTier]:
        """The tokens of each tier, then those of the exact window, sinks and newest."""
        found = []
        for number, (tier, count) in enumerate(zip(self.store.tiers, self.counts(), strict=True)):
            keys, values = (tier.pool.bits_per_value(width, f"{role}.") for role, width in tier.widths.items())
            positions = self.positions(number).sort(-1).values if tier.knows_positions else None
            found.append(HeldTier(count, keys, values, positions))
        exact, bits = self._exact_positions().to(self.store.tiers[0].pool.device), 8.0 * self.store.itemsize
        found.append(HeldTier(len(exact), bits, bits, exact.expand(self.store.heads, -1)))
        return [tier for tier in found if tier.count]

    def _pages(self, number: int) -> list[int]:
        return self.store.sequences.tables[number].rows[self.row]

    def _exact_positions(self) -> Tensor:
        """The positions of the tokens in the exact window, sinks and newest: int64 `[n]` on the host."""
        sequences, length = self.store.sequences, self.length
        exact = 0 if self.store.windows is None else sequences.exact(self.row, length)
        first = min(sequences.sinks, exact)
        return torch.cat([torch.arange(first), torch.arange(length - exact + first, length)])
