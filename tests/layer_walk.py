"""Drives the layers of a cache without a model: the same keys, values and queries, however they are batched and padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.cache import CompressedCache
from calib.runtime.logits import Logits


@dataclass
class Tokens:
    """What one row feeds to every layer: `queries [layers, heads, n, D]`, `keys`, `values [layers, kv_heads, n, D]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, model, count: int, seed: int, magnitude: float = 1.0) -> "Tokens":
        """`count` tokens in the model's dtype, with channels of unequal size as real keys have them."""
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
    """One forward: row i adds `rows[i]`, left-padded to `columns` with rubbish, layer l on `devices[l]`.

    Returns outputs `[layer][row]` `[heads, n, D]`.
    """
    columns = columns or max(map(len, rows))
    held = cache.rows.lengths or [0] * len(rows)
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


def _padded(part: Tensor, columns: int) -> Tensor:
    rubbish = part.new_full((part.shape[0], columns - part.shape[1], part.shape[2]), 77.0)
    return torch.cat([rubbish, part], 1)


def stored(cache: CompressedCache, row: int, layers: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Everything stored of one row in logical order: each field's packed rows `[kv_heads, rows, width]`, and the windows."""
    length, bits = cache.rows.lengths[row], {}
    for number, layer in enumerate(cache.compressed):
        if layers is not None and number not in layers:
            continue
        for stream in layer.store.streams:
            packed = stream.plan.schedule.packed(length)
            for name, tensor in stream.pool.tensors.items():
                pages = tensor[torch.tensor(cache.rows.table.rows[row], dtype=torch.int64)]
                count = packed // stream.pool.fields[name].tokens_per_row
                bits[f"{number}.{stream.role}.{name}"] = pages.transpose(0, 1).flatten(1, 2)[:, :count].clone()
            window = stream.window.in_order([row], packed, length)[0]
            bits[f"{number}.{stream.role}.window"] = window.clone()
    return bits
