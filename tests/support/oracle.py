"""Float64 oracle: decodes what a cache stores, and computes attention over it, without code of the kernels.

Written from the formulas in the docs of `kernels/pack` and `kernels/quantise`, so that a mistake in a kernel is not repeated here.
g_t and g_c are the tokens and channels of a quantisation group, W the packed words of a token, P the planes of a word.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from corrected import corrected
from pairs import summed
from torch import Tensor
from trellis_paths import trellis_components

from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer
from calib.runtime.offload.store import OffloadStore
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.ordered.stream import Stream
from calib.runtime.paging.page_numbers import EMPTY
from calib.runtime.stages.codec import (
    Clipped,
    Codebook,
    Codec,
    Corrected,
    Direction,
    DualScale,
    Exact,
    MixedQuant,
    ScaledChannels,
    Sized,
    Sparse,
    TokenRange,
    TrellisQuant,
)
from calib.runtime.stages.prediction import Prediction
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.transform import (
    Balancer,
    Basis,
    ChannelRange,
    ChannelScale,
    Identity,
    Orthogonal,
    WithoutBias,
)
from calib.runtime.tiered.row_transform import RowTransform
from calib.runtime.tiered.store import TieredStore

# Filled in for tokens that a sliding window has dropped: so large that attention to them fails a comparison.
GARBAGE = 1e3


def parameters(x: np.ndarray, bits: int, clip: float) -> tuple[float, float]:
    """Scale and zero point of one group of values `x`, whose range is narrowed about its middle by the factor `clip`."""
    high, low = float(x.max()), float(x.min())
    middle, half = (high + low) / 2, clip * (high - low) / 2
    return 2 * half / (2**bits - 1), middle - half


def level(x: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """(x - z) / s + 1/2 before the floor and the clamp; 0 where a group is constant (s = 0)."""
    return np.where(scale > 0, (x - zero) / np.where(scale > 0, scale, 1) + 0.5, 0)


def codes_at(level: np.ndarray, bits: int) -> np.ndarray:
    """Codes of `level`: floor, then clamp to 0 ... 2^bits - 1. A tie goes to the upper level."""
    return np.clip(np.floor(level), 0, 2**bits - 1)


def spread(parameter: np.ndarray, tokens: int, channels: int) -> np.ndarray:
    """A group parameter `[..., T/g_t, D/g_c]`, repeated for each value of its group: `[..., T, D]`."""
    if not tokens:
        return parameter.repeat(channels // parameter.shape[-1], -1)
    return parameter.repeat(tokens // parameter.shape[-2], -2).repeat(channels // parameter.shape[-1], -1)


def scale_and_zero(block: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The stored parameters `[..., T/g_t, 2 D/g_c]` as scales and zero points, float64 `[..., T/g_t, D/g_c]` each."""
    stored = block["parameters"].double().numpy()
    columns = stored.shape[-1] // 2
    return stored[..., :columns], stored[..., columns:]


def unpacked(words: np.ndarray, bits: int, channels: int) -> np.ndarray:
    """Codes `[..., channels]` of `words [..., W]`, of int16 or of uint8: channel c is field c // W of word c % W."""
    width, fields = words.shape[-1], 8 * words.itemsize // bits
    assert width == math.ceil(channels / fields)
    unsigned = words.view(np.uint16) if words.itemsize == 2 else words.astype(np.uint16)
    codes = [(unsigned >> np.uint16(bits * field)) & np.uint16(2**bits - 1) for field in range(fields)]
    return np.concatenate(codes, -1)[..., :channels].astype(np.int64)


def mixed(words: np.ndarray, widths: tuple[int, ...], counts: tuple[int, ...]) -> np.ndarray:
    """Components of `MixedQuant`, float64 `[..., kv_heads, T, P max(counts)]`, from the words of all heads side by side,
    `[..., 1, T, W]`. Word n of a head holds its components n + p max(counts), one of each plane p; the others are NaN."""
    most, unsigned = max(counts), words[..., 0, :, :].view(np.uint16)
    found = np.full((*unsigned.shape[:-2], len(counts), unsigned.shape[-2], len(widths) * most), np.nan)
    for head, count in enumerate(counts):
        own = unsigned[..., sum(counts[:head]) : sum(counts[: head + 1])]
        for plane, width in enumerate(widths):
            codes = (own >> np.uint16(sum(widths[:plane]))) & np.uint16(2**width - 1)
            found[..., head, :, plane * most : plane * most + count] = (codes - (2**width - 1) / 2) * 2.0 ** (1 - width)
    return found


def decoded(codec: Codec, block: Mapping[str, Tensor], channels: int, online: Tensor | None = None) -> Tensor:
    """Decode `block`, but do not undo the transform: float64 `[..., kv_heads, T, channels]`; `online`, the row's atoms (CSR)."""
    if isinstance(codec, Exact):
        return block["exact"].double()
    if isinstance(codec, Sparse):
        return summed(codec, block, channels, online)
    if isinstance(codec, Corrected):
        x = decoded(codec.codec, block, channels, online)
        if codec.residual is not None:
            again = {
                name.removeprefix("residual."): part for name, part in block.items() if name.startswith("residual.")
            }
            x = x + decoded(codec.residual, again, channels)
        return torch.from_numpy(corrected(codec, block, x.numpy()))
    if isinstance(codec, Clipped):
        return decoded(codec.codec, block, channels)
    if isinstance(codec, Codebook):
        table = codec.table[0].double().numpy()
        return torch.from_numpy(table[unpacked(block["words"].numpy(), codec.bits, channels)])
    if isinstance(codec, Direction):
        return decoded(codec.codebook, block, channels) * block["norms"].double()
    if isinstance(codec, TokenRange):
        centre, half = block["parameters"].double().split(1, -1)
        return centre + half * decoded(codec.codebook, block, channels)
    if isinstance(codec, DualScale | ScaledChannels):
        even = decoded(codec.uniform, block, channels)
        return even * torch.from_numpy(spread(block["scales"].double().numpy(), *even.shape[-2:]))
    if isinstance(codec, Sized):
        number = unpacked(block["sizes"].numpy(), 4, len(codec.codec.counts))[..., 0, :, :]
        size = torch.from_numpy(2.0 ** ((number - 5) / 2)).mT[..., None]
        return size * decoded(codec.codec, block, channels)
    if isinstance(codec, TrellisQuant):
        return torch.from_numpy(trellis_components(block["words"].numpy(), codec.widths, codec.counts))
    if isinstance(codec, MixedQuant):
        return torch.from_numpy(mixed(block["words"].numpy(), codec.widths, codec.counts))
    codes = unpacked(block["words"].numpy(), codec.bits, channels).astype(np.float64)
    if codec.group is None:
        clip = torch.as_tensor(codec.clip, dtype=torch.float64).expand(codes.shape[-3], 1, 1).numpy()
        return torch.from_numpy(codes * (2 * clip / (2**codec.bits - 1)) - clip)
    scale, zero = scale_and_zero(block)
    return torch.from_numpy(codes * spread(scale, *codes.shape[-2:]) + spread(zero, *codes.shape[-2:]))


def decoded_page(stream: Stream, page: int | list[int]) -> Tensor:
    """Decode one page of a stream and undo its transform: float64 `[kv_heads, slots, head_dim]`; a list of pages is stacked."""
    block = {name: tensor[page] for name, tensor in stream.pool.tensors.items()}
    return stream.plan.transform.inverse(decoded(stream.plan.codec, block, stream.head_dim))


def undone(transform: RowTransform, row: int, y: Tensor) -> Tensor:
    """Undo a tier's transform: transformed tokens `y [kv_heads, T, ...]` of one row -> float64 `[kv_heads, T, head_dim]`."""
    own = {name: getattr(value, "tensor", value) for name, value in vars(transform.stage).items()}
    own = {name: value.double() for name, value in own.items() if isinstance(value, Tensor)}
    if transform.measured is not None:
        own = {name: value[row] for name, value in own.items()}
    match transform.stage:
        case ChannelRange():
            return y * own["half"] + own["center"]
        case ChannelScale():
            return y * own["scale"]
        case Balancer():
            return y / own["balance"]
        case Identity():
            return y
        case Orthogonal():
            return y @ own["matrix"]
        case Basis():
            return own["mean"] + (y.nan_to_num() * own["gain"]) @ own["back"]


class Held(NamedTuple):
    """Decoded tokens of one row: float64 `keys` and `values [kv_heads, count, head_dim]`, and their `positions` in the row,
    int64 `[kv_heads, count]`, or None if a tier of the store does not know its tokens' positions."""

    keys: Tensor
    values: Tensor
    positions: Tensor | None


def held_tokens(layer: CompressedLayer, row: int) -> Held:
    """All tokens that a layer stores of one row.

    An ordered store gives them in order of position, with GARBAGE for tokens that were dropped; a tiered store in any order. Of an
    `OffloadStore` these are the tokens of its device store `low`, without those fetched from the host.
    """
    store = layer.store
    return held_by(store.low if isinstance(store, OffloadStore) else store, row)


def held_by(store: OrderedStore | TieredStore, row: int) -> Held:
    """All tokens a store holds of one row."""
    if isinstance(store, TieredStore):
        return in_tiers(store, row)
    keys, values = (in_order(store, stream, row) for stream in store.streams)
    return Held(keys, values, torch.arange(keys.shape[1]).expand(keys.shape[:2]))


def in_order(store: OrderedStore, stream: Stream, row: int) -> Tensor:
    """All tokens that a stream stores of one row, in order of position: float64 `[kv_heads, length, head_dim]`, with GARBAGE for
    tokens that were dropped. To keys stored without their bias b, R_t b is added at position t."""
    length, schedule = store.sequences.lengths[row], stream.plan.schedule
    packed, ring = schedule.packed(length), stream.window.tokens[row].double()
    exact = ring[:, [token % schedule.window() for token in range(packed, length)]]
    if not packed:
        return exact
    slots = store.sequences.table.page_tokens
    numbers = store.sequences.table.rows[row][: -(-packed // slots)]
    held = [position for position, page in enumerate(numbers) if page != EMPTY]
    pages = torch.full((len(numbers), ring.shape[0], slots, ring.shape[2]), GARBAGE, dtype=torch.float64)
    if held:
        pages[held] = decoded_page(stream, [numbers[position] for position in held])
    found = pages.transpose(0, 1).flatten(1, 2)[:, :packed]
    if isinstance(stream.plan.transform, WithoutBias):
        found = found + biases(stream, packed)
    return torch.cat([found, exact], 1)


def biases(stream: Stream, count: int) -> Tensor:
    """R_t b at the positions t < `count`, float64 `[kv_heads, count, head_dim]`; rotated channels are also multiplied by the
    model's RoPE scaling."""
    bias, rotation = stream.plan.transform.bias.double(), stream.rotation
    turned = 2 * len(rotation.frequencies)
    scale = torch.tensor([rotation.scaling] * turned + [1.0] * (bias.shape[-1] - turned), dtype=torch.float64)
    return scale * rotated(bias.expand(-1, count, -1), rotation.frequencies, torch.arange(count).double()[:, None])


def in_tiers(store: TieredStore, row: int) -> Held:
    """All tokens that a tiered store holds of one row: tier by tier in the order of their slots, then the exact window."""
    length = store.sequences.lengths[row]
    parts: list[list[Tensor]] = [[], [], []]
    for tier, table, count in zip(store.tiers, store.sequences.tables, store.sequences.held(row, length), strict=False):
        pages = torch.tensor(table.rows[row], dtype=torch.int64)
        block = {}
        for name, field in tier.pool.fields.items():
            rows = -(-count // (field.tokens_per_row or tier.pool.page_tokens))
            block[name] = tier.pool.tensors[name][pages].transpose(0, 1).flatten(1, 2)[:, :rows]
        if tier.row_params is not None:
            own = store.sequences.row_params.rows[row]
            block |= {
                name: tensor[own].transpose(0, 1).flatten(1, 2) for name, tensor in tier.row_params.tensors.items()
            }
        for part, (role, stages) in zip(parts, tier.plan.streams(), strict=False):
            own = {name.removeprefix(f"{role}."): field for name, field in block.items() if name.startswith(role)}
            online = store.dictionaries[role].atoms[row] if role in store.dictionaries else None
            y = decoded(stages.codec, own, tier.widths[role], online)
            part.append(undone(tier.transforms[role], row, y))
            if role == "keys" and tier.plan.prediction is not None:
                codes = stages.codec.uncorrected.codec
                narrower = 1 if isinstance(codes, TrellisQuant) else 0  # bits, of a step
                widths = tuple(width + narrower for width in codes.widths)
                predicted = predictions(tier.plan.prediction, widths, y)
        if tier.plan.prediction is not None:
            parts[1][-1] = parts[1][-1] + predicted
        if tier.knows_positions:  # without stored positions, slot t holds the t-th token after the sinks
            in_order = kept_first(store) + torch.arange(count).expand(store.heads, count)
            parts[2].append(block["positions"][..., 0].long() if tier.stores_positions else in_order)
        if store.plan.before_rope:
            positions = parts[2][-1].double()[..., None]
            parts[0][-1] = rotated(parts[0][-1], store.context.rotation.frequencies, positions)
    exact = store.sequences.exact(row, length)
    if store.windows:
        for part, window in zip(parts, store.windows, strict=False):
            part.append(window.tokens[row, :, :exact].double())
    keys, values = (torch.cat(part, 1) for part in parts[:2])
    if not all(tier.knows_positions for tier in store.tiers):
        return Held(keys, values, None)
    return Held(keys, values, torch.cat([*parts[2], in_window(store, row, length).expand(store.heads, exact)], 1))


def predictions(prediction: Prediction, widths: tuple[int, ...], y: Tensor) -> Tensor:
    """Values predicted from decoded key components `y [kv_heads, T, N]`, float64 `[kv_heads, T, D]`, without the values' mean.

    `widths` are the bit widths of the planes of `y`: a component of b bits is counted in half steps of 2^-b.
    """
    fields = y.shape[-1] // len(widths)
    half_steps = y.nan_to_num() * torch.tensor(
        [2.0**width for width in widths for _ in range(fields)], dtype=torch.float64
    )
    return half_steps @ prediction.table.double() * prediction.unit.double()


def kept_first(store: TieredStore) -> int:
    """Number of first tokens that stay in the exact window for ever (sinks)."""
    return store.plan.tiering.sinks if isinstance(store.plan.tiering, RatioTiers) else 0


def in_window(store: TieredStore, row: int, length: int) -> Tensor:
    """Positions of the tokens in the exact window of a row of `length` tokens: its sinks and its newest ones, int64 `[exact]`."""
    exact = store.sequences.exact(row, length)
    first = min(kept_first(store), exact)
    return torch.cat([torch.arange(first), torch.arange(length - exact + first, length)])


def contents(cache: CompressedCache) -> list[list[Held]]:
    """The stored tokens of every row of every compressed layer, as `[layer][row]`."""
    return [
        [held_tokens(layer, row) for row in range(len(cache.sequences.lengths))]
        for layer in cache.compressed
        if layer.store is not None
    ]


def rotated(x: Tensor, frequencies: Tensor, positions: int | Tensor) -> Tensor:
    """Rotate `x [..., T, D]` (RoPE): each channel pair (i, i + r) of the first 2 r channels by `positions` x `frequencies [r]`.

    `positions` is one number for all tokens, or a tensor `[..., T, 1]`. Channels from 2 r on stay as they are.
    """
    count = len(frequencies)
    first, second, rest = x.double().split([count, count, x.shape[-1] - 2 * count], -1)
    cos, sin = (positions * frequencies).cos(), (positions * frequencies).sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None = None,
    sliding: int | None = None,
    positions: Tensor | None = None,
    kept: float | None = None,
    sinks: tuple[int, Tensor] | None = None,
) -> Tensor:
    """Causal attention of one row in float64, one query at a time; the last query has the position of the last key.

    `query [heads, n, D]`, `keys` and `values [kv_heads, total, D]` -> `[heads, n, D]`. `positions [kv_heads, total]` are needed
    if the tokens are not in order of position: -1 masks a token, and the last n are those of the queries. `sliding` is the window
    in tokens. `kept` is the share of oracle eviction: a query attends only to its keys of largest logits, max(1, floor(kept c)) of
    them, c being its position + 1, at most `sliding`. `sinks` is (count, queries `[heads, n, D]`): the logits of the first
    `count` keys use these queries.
    """
    heads, length, _ = query.shape
    total, group = keys.shape[1], heads // keys.shape[0]
    positions = torch.arange(total).expand(keys.shape[:2]) if positions is None else positions
    output = torch.zeros(*query.shape[:2], values.shape[2], dtype=torch.float64)
    for column in range(length):
        mine = total - length + column
        for head in range(heads):
            own, position = positions[head // group, : mine + 1], positions[head // group, mine]
            logits = keys[head // group, : mine + 1].double() @ query[head, column].double() * scale
            if sinks is not None:
                count, instead = sinks
                logits[:count] = keys[head // group, :count].double() @ instead[head, column] * scale
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            if sliding is not None:
                logits[own <= position - sliding] = -torch.inf
            logits[own < 0] = -torch.inf
            if kept is not None:
                seen = int(position) + 1 if sliding is None else min(int(position) + 1, sliding)
                most = max(1, math.floor(kept * seen + 1e-9))
                logits[logits.argsort(descending=True, stable=True)[most:]] = -torch.inf
            output[head, column] = torch.softmax(logits, 0) @ values[head // group, : mine + 1].double()
    return output
