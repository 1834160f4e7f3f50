"""What the cache should hold and answer, worked out another way: float64, from the formulas, no code of the kernels.

Written from the formulas (docs of `kernels/pack` and `kernels/quantise`), so that a mistake there is not repeated here.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer
from calib.runtime.ordered.stream import Stream
from calib.runtime.pages import NOWHERE, PAGE_TOKENS
from calib.runtime.stages.codec import Exact

# Stands for tokens that a sliding window left behind: who attends to it is found out at once.
GARBAGE = 1e3


def parameters(x: np.ndarray, bits: int, clip: float) -> tuple[float, float]:
    """Scale and zero point of one group of values `x`."""
    high, low = float(x.max()), float(x.min())
    middle, half = (high + low) / 2, clip * (high - low) / 2
    return 2 * half / (2**bits - 1), middle - half


def position(x: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """(x - z) / s + 1/2 before the floor and the clamp; 0 where a group is constant (s = 0)."""
    return np.where(scale > 0, (x - zero) / np.where(scale > 0, scale, 1) + 0.5, 0)


def codes_at(place: np.ndarray, bits: int) -> np.ndarray:
    """floor, then clamp: ties go to the upper level."""
    return np.clip(np.floor(place), 0, 2**bits - 1)


def spread(parameter: np.ndarray, tokens: int, channels: int) -> np.ndarray:
    """A group parameter `[..., T/g_t, D/g_c]` at each of its values `[..., T, D]`."""
    return parameter.repeat(tokens // parameter.shape[-2], -2).repeat(channels // parameter.shape[-1], -1)


def scale_and_zero(block: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The stored parameters `[..., T/g_t, 2 D/g_c]` as scales and zero points, float64 `[..., T/g_t, D/g_c]` each."""
    stored = block["parameters"].double().numpy()
    columns = stored.shape[-1] // 2
    return stored[..., :columns], stored[..., columns:]


def unpacked(words: np.ndarray, bits: int, channels: int) -> np.ndarray:
    """Codes `[..., channels]` of int16 `words [..., W]`: channel c is field c // W of word c % W."""
    width, fields = words.shape[-1], 16 // bits
    assert width == math.ceil(channels / fields)
    unsigned = words.view(np.uint16)
    codes = [(unsigned >> np.uint16(bits * field)) & np.uint16(2**bits - 1) for field in range(fields)]
    return np.concatenate(codes, -1)[..., :channels].astype(np.int64)


def decoded_page(stream: Stream, page: int | list[int]) -> Tensor:
    """One page of a stream as tokens: float64 `[kv_heads, PAGE_TOKENS, head_dim]`, the transform undone; a list stacks."""
    codec = stream.plan.codec
    if isinstance(codec, Exact):
        return stream.plan.transform.inverse(stream.pool.tensors["exact"][page].double())
    codes = unpacked(stream.pool.tensors["words"][page].numpy(), codec.bits, stream.head_dim).astype(np.float64)
    if codec.group is None:
        clip = torch.as_tensor(codec.clip, dtype=torch.float64).expand(codes.shape[-3], 1, 1).numpy()
        tokens = codes * (2 * clip / (2**codec.bits - 1)) - clip
    else:
        scale, zero = scale_and_zero({"parameters": stream.pool.tensors["parameters"][page]})
        tokens = codes * spread(scale, *codes.shape[-2:]) + spread(zero, *codes.shape[-2:])
    return stream.plan.transform.inverse(torch.from_numpy(tokens))


def held_tokens(layer: CompressedLayer, stream: Stream, row: int) -> Tensor:
    """All tokens a stream holds of one row, in order: float64 `[kv_heads, length, head_dim]`; GARBAGE where it let go."""
    length, schedule = layer.state.lengths[row], stream.plan.schedule
    packed, ring = schedule.packed(length), stream.window.tokens[row].double()
    exact = ring[:, [token % schedule.window() for token in range(packed, length)]]
    if not packed:
        return exact
    numbers = layer.state.table.rows[row][: -(-packed // PAGE_TOKENS)]
    held = [place for place, page in enumerate(numbers) if page != NOWHERE]
    pages = torch.full((len(numbers), ring.shape[0], PAGE_TOKENS, ring.shape[2]), GARBAGE, dtype=torch.float64)
    if held:
        pages[held] = decoded_page(stream, [numbers[place] for place in held])
    return torch.cat([pages.transpose(0, 1).flatten(1, 2)[:, :packed], exact], 1)


def contents(cache: CompressedCache) -> list[list[tuple[Tensor, Tensor]]]:
    """Keys and values of each compressed layer and row, as `held_tokens`."""
    return [
        [
            tuple(held_tokens(layer, stream, row) for stream in layer.store.streams)
            for row in range(len(cache.rows.lengths))
        ]
        for layer in cache.compressed
        if layer.store is not None
    ]


def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None = None, sliding: int | None = None
) -> Tensor:
    """Causal attention of one row in float64, the last query at the last key, one query at a time.

    `query [heads, n, D]`, `keys` and `values [kv_heads, total, D]` -> `[heads, n, D]`.
    """
    heads, length, _ = query.shape
    total, group = keys.shape[1], heads // keys.shape[0]
    output = torch.zeros(*query.shape[:2], values.shape[2], dtype=torch.float64)
    for column in range(length):
        place = total - length + column
        first = 0 if sliding is None else max(0, place - sliding + 1)
        seen = slice(first, place + 1)
        for head in range(heads):
            logits = keys[head // group, seen].double() @ query[head, column].double() * scale
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            output[head, column] = torch.softmax(logits, 0) @ values[head // group, seen].double()
    return output
