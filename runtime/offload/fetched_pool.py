"""The exact pairs that were fetched to the device, which stay there as long as they are chosen."""

import torch
from torch import Tensor

from calib.kernels.host_gather.operation import exchange, host_gather
from calib.runtime.attend.fetched_tokens import EMPTY
from calib.runtime.device.side_stream import SideStream
from calib.runtime.files.state import State, StateError, tensor_like
from calib.runtime.ordered.store import OrderedStore

STEP = 32  # entries are allocated in steps


class FetchedPool:
    """The fetched entries of a layer: `pairs [rows, kv_heads, n, Dk + Dv]`, and each entry's token, `positions` int32
    `[rows, kv_heads, n]`.

    `fetched` counts the pairs copied from the host, int64 `[1]`.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Starts without entries; the first keys and values `[rows, kv_heads, n, D]` fix shapes, dtype and device."""
        self.widths = [keys.shape[3], values.shape[3]]
        self.pairs = keys.new_zeros(*keys.shape[:2], 0, sum(self.widths))
        self.positions = torch.zeros(*keys.shape[:2], 0, dtype=torch.int32, device=keys.device)
        self.fetched = torch.zeros(1, dtype=torch.int64, device=keys.device)
        self.side = SideStream(keys.device)

    def fit(self, entries: int, most: int) -> None:
        """Makes room for `entries` entries per row and head, never more than `most`."""
        wanted, (rows, heads, have) = min(most, -(-entries // STEP) * STEP), self.positions.shape
        if wanted <= have:
            return
        self.side.wait()
        more = self.pairs.new_zeros(rows, heads, wanted - have, self.pairs.shape[3])
        self.pairs = torch.cat([self.pairs, more], 2)
        self.positions = torch.cat([self.positions, self.positions.new_full((rows, heads, wanted - have), EMPTY)], 2)

    def of(self, rows: range) -> tuple[Tensor, Tensor, Tensor]:
        """Positions int32 `[rows, kv_heads, n]`, keys and values `[rows, kv_heads, n, D]`, after pending fetches."""
        self.side.wait()
        keys, values = self.pairs[rows.start : rows.stop].split(self.widths, -1)
        return self.positions[rows.start : rows.stop], keys, values

    def fetch(self, rows: range, chosen: Tensor, host: OrderedStore, reach: int) -> None:
        """Replaces the entries by the tokens `chosen` int64 `[rows, kv_heads, at most n]`, whose positions are less than
        `reach`.

        Tokens that are not fetched yet are copied from `host` on a side stream, while the main stream goes on.
        """
        assert host.pairs is not None
        pages = host.pairs.pairs
        own = slice(rows.start, rows.stop)
        if pages is None or not len(pages):  # nothing was ever stored, so nothing can be chosen
            return
        table = host.sequences.table
        numbers = table.numbers(self.positions.device)[own]
        with self.side.work(chosen, numbers, self.pairs, self.positions, self.fetched):
            found = exchange(self.positions[own], chosen, numbers, table.page_tokens, reach, self.fetched)
            host_gather(pages, *found, self.pairs[own])

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        self.side.wait()
        sources = sources.to(self.positions.device)
        self.pairs, self.positions = self.pairs.index_select(0, sources), self.positions.index_select(0, sources)

    def to(self, device: torch.device) -> None:
        """Moves every entry to `device`."""
        self.side.wait()
        self.pairs, self.positions, self.fetched = (
            part.to(device) for part in (self.pairs, self.positions, self.fetched)
        )
        self.side = SideStream(device)

    def state(self) -> State:
        """All entries, for a file."""
        self.side.wait()
        return {"pairs": self.pairs, "positions": self.positions, "fetched": self.fetched}

    def restore(self, state: State, lengths: list[int], most: int) -> None:
        """Fills the pool from `state`, for rows of these lengths. Raises StateError for more than `most` entries, for positions
        that a row does not have, and for a token fetched twice."""
        self.positions = tensor_like(state, "positions", self.positions, free=(2,))
        like = self.pairs.new_zeros(()).expand(*self.positions.shape, self.pairs.shape[3])
        self.pairs, self.fetched = tensor_like(state, "pairs", like), tensor_like(state, "fetched", self.fetched)
        entries = self.positions.shape[2]
        if entries > most:
            raise StateError(f"'positions' are {entries} tokens fetched, expected {most} at most")
        if self.positions.is_meta or not self.positions.numel():
            return
        held = self.positions.sort(-1).values
        ends = torch.tensor(lengths, device=held.device)[:, None]
        twice = (held[..., 1:] == held[..., :-1]) & (held[..., 1:] != EMPTY)
        if bool((held[..., 0] < EMPTY).any() | (held[..., -1] >= ends).any() | twice.any()):
            raise StateError("'positions' of fetched tokens are outside their row or occur twice")

    def bytes(self) -> int:
        """Bytes of the entries, their positions and the counter, from shapes."""
        entries = self.positions.numel()
        return entries * (sum(self.widths) * self.pairs.element_size() + 4) + 8
