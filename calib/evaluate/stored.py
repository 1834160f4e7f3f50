"""Reads a row's tokens from the pages of a layer's store: decoded keys and values, their positions, and their size in bits.

Of a store that is split between device and host, only the device's part is read. Exact tokens of a window are not in pages; they
and their bytes are left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.offload.store import OffloadStore
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.ordered.stream import Stream
from calib.runtime.paging.pool import PagePool
from calib.runtime.store import Store
from calib.runtime.tiered.store import TieredStore
from calib.runtime.tiered.tier import POSITIONS

STREAMS = ("keys", "values")


@dataclass(frozen=True)
class Stored:
    """The stored keys, or values, of one row: n tokens of each KV head.

    Attributes:
        tokens: the decoded tokens, float32 `[kv_heads, n, head_dim]`, in any order.
        positions: positions of these tokens in the row, int64 `[kv_heads, n]`.
    """

    tokens: Tensor
    positions: Tensor


def on_device(store: Store) -> OrderedStore | TieredStore:
    """Returns the store itself, or the device part of a store that is split between device and host."""
    found = store.low if isinstance(store, OffloadStore) else store
    assert isinstance(found, OrderedStore | TieredStore)
    return found


def knows_positions(store: OrderedStore | TieredStore) -> bool:
    """Whether the store knows the position of the token in each slot."""
    return isinstance(store, OrderedStore) or all(tier.knows_positions for tier in store.tiers)


def kept(store: OrderedStore | TieredStore, row: int) -> float:
    """Returns the share of a row's tokens that are on the device, in pages or in a window."""
    length = store.sequences.lengths[row]
    if isinstance(store, OrderedStore) or not length:
        return 1.0
    return store.sequences.kept(row, length) / length


def stored(store: OrderedStore | TieredStore, row: int) -> dict[str, Stored]:
    """Returns a row's stored tokens by stream; tokens of several tiers are concatenated. The store must know its positions."""
    if isinstance(store, OrderedStore):
        return {stream.role: _of_stream(store, stream, row) for stream in store.streams}
    device = store.tiers[0].pool.device
    decoded = ([part.to(device) for part in parts] for parts in zip(*store.decoded(row), strict=True))
    keys, values = (torch.cat(parts, 1) for parts in decoded)
    positions = torch.cat([store.positions(row, number) for number in range(len(store.tiers))], 1)
    return {"keys": Stored(keys, positions), "values": Stored(values, positions)}


def page_bits(store: OrderedStore | TieredStore, row: int) -> dict[str, float]:
    """Returns the bits of a row's encoded tokens by stream: all that they are decoded from, except tables of the artifact.

    Counted are codes, parameters, corrections, and the row's share of atoms and transforms made online; positions count half for
    keys and half for values. Empty slots of a page are not counted.
    """
    if isinstance(store, OrderedStore):
        length = store.sequences.lengths[row]
        return {s.role: 8 * sum(_used(s.pool, s.plan.schedule.packed(length)).values()) for s in store.streams}
    found = dict.fromkeys(STREAMS, 0.0)
    counts, rows = store.counts(row), len(store.sequences.lengths)
    if not any(counts):
        return found
    for tier, count in zip(store.tiers, counts, strict=True):
        used = _used(tier.pool, count)
        if tier.row_params is not None and count:
            used |= _used(tier.row_params, 1)
        for name, size in used.items():
            owners = STREAMS if name == POSITIONS else (name.partition(".")[0],)
            for owner in owners:
                found[owner] += 8 * size / len(owners)
    for (role, _), transform in store.transforms.items():
        found[role] += 8 * transform.bytes() / rows
    for role, dictionary in store.dictionaries.items():
        found[role] += 8 * dictionary.bytes() / rows
    return found


def _of_stream(store: OrderedStore, stream: Stream, row: int) -> Stored:
    tokens = stream.decoded(store.sequences.table, row, store.sequences.lengths[row])
    return Stored(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2]))


def _used(pool: PagePool, tokens: int) -> dict[str, int]:
    """Returns, by field, the bytes of the page rows that hold the first `tokens` tokens of a pool."""
    rows = {name: -(-tokens // pool.rows_of(field)) for name, field in pool.fields.items()}
    return {name: rows[name] * field.row_bytes(pool.kv_heads) for name, field in pool.fields.items()}
