"""The tokens that a forward attended to, also if some came from the host: low-bit ones, exact ones, or a mixture.

Which tokens were fetched is read from the store; tests/placement tests that these are the right ones.
"""

from typing import Any

import oracle
import torch
from oracle import GARBAGE, Held
from torch import Tensor

from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer
from calib.runtime.offload.store import OffloadStore
from calib.runtime.offload.top_tokens import TopTokensStore


class Moment:
    """The state of one row of a layer before a forward; after it, `met` returns the tokens that the forward attended to."""

    def __init__(self, layer: CompressedLayer, row: int) -> None:
        self.store: Any = layer.store
        self.row, self.held = row, oracle.held_tokens(layer, row)
        if isinstance(self.store, OffloadStore):
            self.exact, self.pool = (
                oracle.held_by(self.store.host, row),
                self.store.pool.positions[row].clone(),
            )

    def met(self, columns: int, speculative: bool) -> Held:
        """The tokens that a forward of `columns` columns attended to. Of an `OffloadStore` they are in order of position, with
        GARBAGE and position -1 for tokens that it did not attend to. A step with a speculative token uses the tokens that were
        fetched before it, any other forward those that it fetched itself."""
        if not isinstance(self.store, OffloadStore):
            return self.held
        if isinstance(self.store, TopTokensStore):
            if not self.store.policy.k:
                return self.held
            if columns > 1 and not speculative:
                return self.exact
        return self._mixed(self.pool if speculative else self.store.pool.positions[self.row])

    def _mixed(self, fetched_positions: Tensor) -> Held:
        own = self.held.positions
        parts = [torch.full_like(part, GARBAGE) for part in self.exact[:2]]
        positions = torch.full(parts[0].shape[:2], -1)
        for head, (mine, fetched) in enumerate(zip(own, fetched_positions, strict=True)):
            fetched = fetched[fetched >= 0].long()
            for part, held, exact in zip(parts, self.held[:2], self.exact[:2], strict=True):
                part[head, mine] = held[head]
                part[head, fetched] = exact[head, fetched]
            positions[head, mine] = mine
            positions[head, fetched] = fetched
        return Held(*parts, positions)


def moments(cache: CompressedCache) -> list[list[Moment]]:
    """The state of every row of every compressed layer that has a store, as `[layer][row]`."""
    rows = range(len(cache.sequences.lengths))
    return [[Moment(layer, row) for row in rows] for layer in cache.compressed if layer.store is not None]
