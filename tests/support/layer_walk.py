"""Feeds the layers of a cache without a model: a row's keys, values and queries are the same in any batch and with any padding.

L is layers, n tokens of a forward, D head_dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tolerances import FLOAT32_ATTENTION
from torch import Tensor

from calib.runtime.cache import CompressedCache
from calib.runtime.logits import Logits
from calib.runtime.offload.store import OffloadStore
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.paging.pages import PageTable
from calib.runtime.paging.pool import PagePool
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.tiered.local import LocalStore
from calib.runtime.tiered.store import TieredStore


@dataclass
class Tokens:
    """Tokens of one row for every layer: `queries [layers, heads, n, D]`, `keys` and `values [layers, kv_heads, n, D]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, model, count: int, seed: int, magnitude: float = 1.0) -> "Tokens":
        """`count` random tokens in the model's dtype, with channels of unequal size, as in real keys."""
        config, draw = model.config, torch.Generator().manual_seed(seed)
        width = 0.3 + 2 * torch.rand(config.num_hidden_layers, 1, 1, config.head_dim, generator=draw)
        shapes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        parts = [
            magnitude * width * torch.randn(config.num_hidden_layers, h, count, config.head_dim, generator=draw)
            for h in shapes
        ]
        return cls(*(part.to(model.dtype) for part in parts))

    def __getitem__(self, span: slice) -> "Tokens":
        return Tokens(self.queries[:, :, span], self.keys[:, :, span], self.values[:, :, span])

    def __len__(self) -> int:
        return self.keys.shape[2]


def feed(
    cache: CompressedCache, rows: list[Tokens], columns: int | None = None, devices: Sequence[str] = ("cpu", "cpu")
) -> list[list[Tensor]]:
    """Run one forward: row i adds `rows[i]`, left-padded to `columns` with the number 77; layer l is on `devices[l]`.

    Returns attention outputs `[layer][row]`, each `[heads, n, D]`, without padding.
    """
    columns = columns or max(map(len, rows))
    held = cache.sequences.lengths or [0] * len(rows)
    seen = cache.get_seq_length()
    mask = torch.zeros(len(rows), seen + columns, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        mask[row, seen - held[row] : seen] = True
        mask[row, seen + columns - len(tokens) :] = True
    outputs = []
    for number, layer in enumerate(cache.compressed):
        query, key, value = (
            torch.stack([_padded(getattr(tokens, part)[number], columns) for tokens in rows]).to(devices[number])
            for part in ("queries", "keys", "values")
        )
        layer.update(key, value)
        padded = mask[:, -columns:].logical_not().any() or mask.logical_not().any()
        output = layer.attend(query, mask if padded else None, Logits(query.shape[-1] ** -0.5))
        outputs.append([output[row, :, columns - len(tokens) :] for row, tokens in enumerate(rows)])
    return outputs


def decoded(cache: CompressedCache, tokens: Tokens, prompt: int) -> None:
    """Feed the first `prompt` tokens in one forward, then every token in a decode step."""
    forwards(cache, tokens, [prompt] + [1] * (len(tokens) - prompt))


def forwards(cache: CompressedCache, tokens: Tokens, sizes: list[int]) -> None:
    """Feed the tokens in forwards of these sizes; sizes of 0 are skipped."""
    at = 0
    for size in filter(None, sizes):
        feed(cache, [tokens[at : at + size]])
        at += size


def _padded(part: Tensor, columns: int) -> Tensor:
    rubbish = part.new_full((part.shape[0], columns - part.shape[1], part.shape[2]), 77.0)
    return torch.cat([rubbish, part], 1)


def stored(cache: CompressedCache, row: int, layers: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Everything stored of one row, by name, `[kv_heads, tokens, width]` each: packed fields in the order of their slots and exact
    windows; of tiered stores also accumulated attention ("mass") and the numbers that a transform measured on the row.

    Of an `OffloadStore` both the device's and the host's store; pairs fetched to the device are not part of it.
    """
    bits = {}
    for number, layer in enumerate(cache.compressed):
        if layers is None or number in layers:
            bits |= {f"{number}.{name}": part.clone() for name, part in parts_of(layer.store, row)}
    return bits


def parts_of(store: OrderedStore | TieredStore | OffloadStore, row: int) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of everything that a store has of a row."""
    if isinstance(store, OffloadStore):
        yield from parts_of(store.low, row)
        yield from ((f"host {name}", part) for name, part in parts_of(store.host, row))
        return
    yield from in_tiers(store, row) if isinstance(store, TieredStore) else in_order(store, row)


def in_order(store: OrderedStore, row: int) -> Iterator[tuple[str, Tensor]]:
    """Fields and windows of both streams, in the order of the tokens."""
    length = store.sequences.lengths[row]
    for stream in store.streams:
        packed = stream.plan.schedule.packed(length)
        for name, tensor in stream.pool.tensors.items():
            count = packed // stream.pool.fields[name].tokens_per_row
            yield f"{stream.role}.{name}", slots_of(tensor, store.sequences.table, row)[:, :count]
        yield f"{stream.role}.window", stream.window.in_order([row], packed, length)[0]


def in_tiers(store: TieredStore, row: int) -> Iterator[tuple[str, Tensor]]:
    """Fields of every tier, windows, mass, and the row's measured numbers."""
    length = store.sequences.lengths[row]
    held, exact = store.sequences.held(row, length), store.sequences.exact(row, length)
    for number, (tier, table) in enumerate(zip(store.tiers, store.sequences.tables, strict=False)):
        for name, tensor in tier.pool.tensors.items():
            rows = -(-held[number] // tier.pool.rows_of(tier.pool.fields[name]))
            slots = slots_of(tensor, table, row)[:, :rows]
            yield f"tier {number}.{name}", trimmed(slots) if name.endswith("coefficients") else slots
        if tier.row_params is not None:
            for name, tensor in tier.row_params.tensors.items():
                yield f"row_params {number}.{name}", trimmed(slots_of(tensor, store.sequences.row_params, row))
    for role, window in zip(("keys", "values"), store.windows or (), strict=False):
        yield f"{role}.window", window.tokens[row, :, :exact]
    if store.observes and "mass" in store.of_rows:
        yield "mass", store.mass[row, :, : exact if store.windows else held[0]]
    for number, ((role, _), transform) in enumerate(store.transforms.items()):
        if transform.measured is not None:
            for name, tensor in vars(transform.stage).items():
                yield f"{role} {name} {number}", tensor[row]
    if isinstance(store, LocalStore):
        count = store.tiering.blocks(length)
        yield "representatives", store.representatives[row, :, :count].flatten(1, 2)


def trimmed(numbers: Tensor) -> Tensor:
    """Parameters of a segment without trailing zeros, which are there if another row of the batch has a longer prompt."""
    used = numbers.ne(0).any(1).any(0).nonzero()
    return numbers[..., : int(used[-1]) + 1 if len(used) else 0]


def sequence_states(cache: CompressedCache) -> list[tuple[SequenceState, int, PageTable]]:
    """Every page table of a cache, with its sequence state and its number in it, in the order of `pools_of`."""
    found, rows = [], cache.sequences
    while rows is not None:
        found += [(rows, number, table) for number, table in enumerate(rows.tables)]
        rows = rows.host_state
    return found


def pools_of(store: OrderedStore | TieredStore | OffloadStore) -> list[list[PagePool]]:
    """The pools of each page table: of an ordered store, keys and values; of a tiered one, each tier's and all row parameters."""
    if isinstance(store, OffloadStore):
        return pools_of(store.low) + pools_of(store.host)
    if isinstance(store, TieredStore):
        row_params = [tier.row_params for tier in store.tiers if tier.row_params is not None]
        return [[tier.pool] for tier in store.tiers] + ([row_params] if row_params else [])
    return [[stream.pool for stream in store.streams]]


def slots_of(tensor: Tensor, table: PageTable, row: int) -> Tensor:
    """A row's slots of one field, one after the other: `[kv_heads, slots, width]`."""
    return tensor[torch.tensor(table.rows[row], dtype=torch.int64)].transpose(0, 1).flatten(1, 2)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], mass: float = FLOAT32_ATTENTION) -> list[str]:
    """Names of the parts in which two rows differ. Parts are compared bit for bit, whatever their dtype; accumulated attention may
    differ by the share `mass` of its largest entry, because sums of attention depend on the shapes of the products."""
    names = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        mine, other = found[name].double(), expected[name].double()
        if mine.shape != other.shape:
            names.append(name)
        elif name.endswith("mass") and mine.numel():
            names += [name] * (not bool((mine - other).abs().max() <= mass * other.abs().max()))  # NaN differs
        elif not torch.equal(mine, other):
            names.append(name)
    return names
