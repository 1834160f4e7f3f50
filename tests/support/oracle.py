"""What the cache should hold and answer, worked out another way: float64, from the formulas, no code of the kernels.

Written from the formulas (docs of `kernels/pack` and `kernels/quantise`), so that a mistake there is not repeated here.
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

# Stands for tokens that a sliding window left behind: who attends to it is found out at once.
GARBAGE = 1e3


def parameters(x: np.ndarray, bits: int, clip: float) -> tuple[float, float]:
    """Scale and zero point of one group of values `x`."""
    high, low = float(x.max()), float(x.min())
    middle, half = (high + low) / 2, clip * (high - low) / 2
    return 2 * half / (2**bits - 1), middle - half


def level(x: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """(x - z) / s + 1/2 before the floor and the clamp; 0 where a group is constant (s = 0)."""
    return np.where(scale > 0, (x - zero) / np.where(scale > 0, scale, 1) + 0.5, 0)


def codes_at(level: np.ndarray, bits: int) -> np.ndarray:
    """floor, then clamp: ties go to the upper level."""
    return np.clip(np.floor(level), 0, 2**bits - 1)


def spread(parameter: np.ndarray, tokens: int, channels: int) -> np.ndarray:
    """A group parameter `[..., T/g_t, D/g_c]` at each of its values `[..., T, D]`."""
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
    """Components, float64 `[..., kv_heads, T, P max(counts)]`, of a row of all heads' words `[..., 1, T, W]`; what no word holds
    is NaN."""
    most, unsigned = max(counts), words[..., 0, :, :].view(np.uint16)
    found = np.full((*unsigned.shape[:-2], len(counts), unsigned.shape[-2], len(widths) * most), np.nan)
    for head, count in enumerate(counts):
        own = unsigned[..., sum(counts[:head]) : sum(counts[: head + 1])]
        for plane, width in enumerate(widths):
            codes = (own >> np.uint16(sum(widths[:plane]))) & np.uint16(2**width - 1)
            found[..., head, :, plane * most : plane * most + count] = (codes - (2**width - 1) / 2) * 2.0 ** (1 - width)
    return found


def decoded(codec: Codec, block: Mapping[str, Tensor], channels: int, online: Tensor | None = None) -> Tensor:
    """Encoded tokens before their transform is undone: float64 `[..., kv_heads, T, channels]`; `online` a row's own atoms."""
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
    """One page of a stream as tokens: float64 `[kv_heads, slots, head_dim]`, the transform undone; a list stacks."""
    block = {name: tensor[page] for name, tensor in stream.pool.tensors.items()}
    return stream.plan.transform.inverse(decoded(stream.plan.codec, block, stream.head_dim))


def undone(transform: RowTransform, row: int, y: Tensor) -> Tensor:
    """The tokens of one row `[kv_heads, T, head_dim]` as they were before a tier's transform."""
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
    """What is held of one row: float64 `keys`, `values [kv_heads, count, head_dim]`, and the `positions` of the tokens in the
    row, int64 `[kv_heads, count]`; None where a tier does not keep them."""

    keys: Tensor
    values: Tensor
    positions: Tensor | None


def held_tokens(layer: CompressedLayer, row: int) -> Held:
    """All tokens a layer holds of one row: in order, GARBAGE where it let go; those of tiers in any order.

    Of a store in two places those that the device has by itself, as it has them.
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
    """All tokens a stream holds of one row, in order: float64 `[kv_heads, length, head_dim]`; GARBAGE where it let go. Keys that
    lie in pages without their bias have it again, R_t b at position t."""
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
    """R_t b of a row's first tokens, float64 `[kv_heads, count, head_dim]`, as the model scales what RoPE turns."""
    bias, rotation = stream.plan.transform.bias.double(), stream.rotation
    turned = 2 * len(rotation.frequencies)
    scale = torch.tensor([rotation.scaling] * turned + [1.0] * (bias.shape[-1] - turned), dtype=torch.float64)
    return scale * rotated(bias.expand(-1, count, -1), rotation.frequencies, torch.arange(count).double()[:, None])


def in_tiers(store: TieredStore, row: int) -> Held:
    """The tokens of one row: tier by tier in the order of their slots, then the window."""
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
        if tier.knows_positions:  # where nothing says otherwise slot t holds token t of those behind the sinks
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
    """What components `y [kv_heads, T, N]` of decoded keys say of their values: a half step of b bits is 2^-b."""
    fields = y.shape[-1] // len(widths)
    half_steps = y.nan_to_num() * torch.tensor(
        [2.0**width for width in widths for _ in range(fields)], dtype=torch.float64
    )
    return half_steps @ prediction.table.double() * prediction.unit.double()


def kept_first(store: TieredStore) -> int:
    """Tokens that never leave the window."""
    return store.plan.tiering.sinks if isinstance(store.plan.tiering, RatioTiers) else 0


def in_window(store: TieredStore, row: int, length: int) -> Tensor:
    """The positions of the tokens in the exact window when a row holds `length`: its sinks and its newest."""
    exact = store.sequences.exact(row, length)
    first = min(kept_first(store), exact)
    return torch.cat([torch.arange(first), torch.arange(length - exact + first, length)])


def contents(cache: CompressedCache) -> list[list[Held]]:
    """What each compressed layer holds of each row."""
    return [
        [held_tokens(layer, row) for row in range(len(cache.sequences.lengths))]
        for layer in cache.compressed
        if layer.store is not None
    ]


def rotated(x: Tensor, frequencies: Tensor, positions: int | Tensor) -> Tensor:
    """RoPE by `positions` more: of the first 2 r channels (i, i + r) turn by `positions` x `frequencies [r]`.

    Positions of tokens, `[..., T, 1]`, each for its own.
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
    """Causal attention of one row in float64, the last query at the last key, one query at a time.

    `query [heads, n, D]`, `keys` and `values [kv_heads, total, D]` -> `[heads, n, D]`. `positions [kv_heads, total]` are the
    tokens' own positions where they do not lie in order, -1 where there is none; the last n are the queries'. Oracle eviction
    keeps the share `kept` of the tokens there would be without holes, those of the greatest logits. The first of `sinks`
    tokens are met with the queries given beside their number.
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
