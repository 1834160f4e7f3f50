"""Triton kernel of attention over tokens in sparse coding: keys and values of a tile are decoded from their atoms and attended.

Only the pairs are read from memory; atoms stay in the L2 cache. A row's tokens are divided among programs, whose parts of the
softmax are merged afterwards (`kernels/attend`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.desparsify_attend.triton_pairs import atom_at, coefficient_of, index_of
from calib.kernels.dispatch import LITTLE_MEMORY, capability_of
from calib.kernels.launch import launch
from calib.kernels.pack.reference import bytes_per_token

# Limits of a program: query rows of a KV head; padded rows x channels (shared memory), and the same on GPUs with little shared
# memory; pairs; channels.
MOST_ROWS, MOST_QUERY, MOST_OF_LITTLE, MOST_PAIRS, MOST_CHANNELS = 64, 64 * 128, 32 * 128, 32, 256

# Programs that fill a GPU several times over; a constant, so that the grid depends on shapes alone and can be captured in a graph.
PROGRAMS = 1024
WARPS, STAGES = 4, 1

LOWEST = torch.finfo(torch.float32).min
COEFFICIENTS = (torch.float16, torch.float32, torch.uint8)
ATOMS = (torch.float16, torch.float32)


# Arguments that change with the cache, or may be 1, and must not cause a recompilation.
_VARYING = ["table_row", "split_tokens", "key_first", "key_columns", "value_first", "value_columns"]
_VARYING += ["columns", "key_pairs", "sparsity"]


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    query, key_indices, key_coefficients, key_offline, key_online,
    value_indices, value_coefficients, value_offline, value_online, table, used, cos, sin, positions, back, top, mass, mixed,
    heads, table_row, table_page, split_tokens, key_first, key_columns, value_first, value_columns,
    columns, key_pairs, sparsity, softcap,
    R: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, HALVES: tl.constexpr, REST: tl.constexpr, RESTS: tl.constexpr,
    KEY_PAIRS: tl.constexpr, KEY_BITS: tl.constexpr, KEY_BYTES: tl.constexpr, KEY_FLOAT8: tl.constexpr,
    KEY_OFFLINE: tl.constexpr, KEY_ONLINE: tl.constexpr, KEY_UNROLL: tl.constexpr,
    SPARSITY: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS_2: tl.constexpr, WIDTH_2: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_BYTES: tl.constexpr, VALUE_FLOAT8: tl.constexpr,
    VALUE_OFFLINE: tl.constexpr, VALUE_ONLINE: tl.constexpr, UNROLL: tl.constexpr,
    POSITIONS: tl.constexpr, BACK: tl.constexpr, SOFTCAP: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Attends to the tokens of one split of a row and KV head with its R query rows (ROWS with padding)."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(0)
    own = (row * heads + head).to(tl.int64)
    r = tl.arange(0, ROWS)
    block = tl.arange(0, BLOCK)
    half, rest = tl.arange(0, HALVES), tl.arange(0, RESTS)
    # For values, the chunks of a token are separate rows of a tile.
    vectors = tl.arange(0, BLOCK * CHUNKS_2)
    of_token, chunk = vectors // CHUNKS_2, vectors % CHUNKS_2
    wide = tl.arange(0, WIDTH_2)

    asked = query + own * R * D + r[:, None] * D
    if HALF > 0:
        held = (r < R)[:, None] & (half < HALF)[None, :]
        query_first = tl.load(asked + half[None, :], mask=held, other=0.0)
        query_second = tl.load(asked + (HALF + half)[None, :], mask=held, other=0.0)
    if REST > 0:
        held = (r < R)[:, None] & (rest < REST)[None, :]
        query_rest = tl.load(asked + (2 * HALF + rest)[None, :], mask=held, other=0.0)
    if BACK:
        behind = tl.load(back + row * columns + r % columns)
    key_online += row.to(tl.int64) * key_columns * D
    value_online += row.to(tl.int64) * value_columns * WIDTH

    most = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, CHUNKS_2 * WIDTH_2], tl.float32)
    start = split * split_tokens
    stop = tl.minimum(start + split_tokens, tl.load(used + row))
    for at in range(start, stop, BLOCK):
        page = tl.load(table + row * table_row + (at // SLOTS) * table_page).to(tl.int64)
        base = (page * heads + head) * SLOTS + at % SLOTS
        there = at + block < stop
        slot = base + block

        first = tl.zeros([BLOCK, HALVES], tl.float32)
        second = tl.zeros([BLOCK, HALVES], tl.float32)
        others = tl.zeros([BLOCK, RESTS], tl.float32)
        # The number of pairs must not be a constant: else the compiler unrolls the whole loop, and converts the layout for the
        # products once per atom.
        for group in range(0, key_pairs, KEY_UNROLL):
            for one in tl.static_range(KEY_UNROLL):
                pair = group + one
                index = index_of(key_indices + slot * KEY_BYTES, pair, there, KEY_BITS, KEY_PAIRS)
                weight = coefficient_of(key_coefficients + slot * KEY_PAIRS, pair, there, KEY_FLOAT8)[:, None]
                atom = atom_at(key_offline, key_online, index, key_first, KEY_ONLINE, KEY_OFFLINE, D)[:, None]
                if HALF > 0:
                    inside = (half < HALF)[None, :]
                    first += weight * tl.load(atom + half[None, :], mask=inside, other=0.0).to(tl.float32)
                    second += weight * tl.load(atom + (HALF + half)[None, :], mask=inside, other=0.0).to(tl.float32)
                if REST > 0:
                    inside = (rest < REST)[None, :]
                    others += weight * tl.load(atom + (2 * HALF + rest)[None, :], mask=inside, other=0.0).to(tl.float32)

        position = at + block
        if POSITIONS:
            position = tl.load(positions + slot, mask=there, other=0)
        scores = tl.zeros([ROWS, BLOCK], tl.float32)
        if HALF > 0:
            angle = position[:, None] * HALF + half[None, :]
            known = there[:, None] & (half < HALF)[None, :]
            c, s = tl.load(cos + angle, mask=known, other=0.0), tl.load(sin + angle, mask=known, other=0.0)
            scores = tl.dot(query_first, tl.trans(first * c - second * s), scores, input_precision="tf32x3")
            scores = tl.dot(query_second, tl.trans(second * c + first * s), scores, input_precision="tf32x3")
        if REST > 0:
            scores = tl.dot(query_rest, tl.trans(others), scores, input_precision="tf32x3")
        if SOFTCAP:
            scores = scores / softcap
            fall = tl.exp(-2 * tl.abs(scores))
            scores = tl.where(scores < 0, fall - 1, 1 - fall) / (1 + fall) * softcap
        seen = there[None, :]
        if BACK:
            seen = seen & (position[None, :] > behind[:, None])
        scores = tl.where(seen, scores, float("-inf"))

        # A row with masked tokens only has a maximum of -inf; the finite start value makes weights 0 instead of NaN.
        larger = tl.maximum(most, tl.max(scores, 1))
        keep = tl.exp(most - larger)
        weights = tl.exp(scores - larger[:, None])
        total = total * keep + tl.sum(weights, 1)
        most = larger

        vector = tl.zeros([BLOCK * CHUNKS_2, WIDTH_2], tl.float32)
        mine = base + of_token
        have = (at + of_token < stop) & (chunk < CHUNKS)
        for group in range(0, sparsity, UNROLL):
            for one in tl.static_range(UNROLL):
                number = chunk * SPARSITY + group + one
                index = index_of(value_indices + mine * VALUE_BYTES, number, have, VALUE_BITS, SPARSITY * CHUNKS)
                weight = coefficient_of(value_coefficients + mine * (SPARSITY * CHUNKS), number, have, VALUE_FLOAT8)
                atom = atom_at(value_offline, value_online, index, value_first, VALUE_ONLINE, VALUE_OFFLINE, WIDTH)
                part = tl.load(atom[:, None] + wide[None, :], mask=(wide < WIDTH)[None, :], other=0.0)
                vector += weight[:, None] * part.to(tl.float32)
        vector = tl.reshape(vector, [BLOCK, CHUNKS_2 * WIDTH_2])
        summed = tl.dot(weights, vector, summed * keep[:, None], input_precision="tf32x3")

    into = (own * splits + split) * R + r
    tl.store(top + into, most, mask=r < R)
    tl.store(mass + into, total, mask=r < R)
    column = tl.arange(0, CHUNKS_2 * WIDTH_2)
    of_chunk, of_width = column // WIDTH_2, column % WIDTH_2
    channel = of_chunk * WIDTH + of_width
    real = (r < R)[:, None] & ((of_chunk < CHUNKS) & (of_width < WIDTH))[None, :]
    tl.store(mixed + into[:, None] * (CHUNKS * WIDTH) + channel[None, :], summed, mask=real)


def supports(query: Tensor, keys: SparsePages, values: SparsePages) -> bool:
    """Whether the kernel supports these: keys in one chunk, floating point coefficients, few query rows."""
    rows, channels = query.shape[2], max(query.shape[3], values.chunks * values.width)
    most = MOST_OF_LITTLE if capability_of(query.device) in LITTLE_MEMORY else MOST_QUERY
    return (
        rows <= MOST_ROWS
        and triton.next_power_of_2(rows) * triton.next_power_of_2(channels) <= most
        and channels <= MOST_CHANNELS
        and keys.chunks == 1
        and keys.indices.shape[2] % 16 == 0
        and all(_dictionary_served(pages) and _pairs_served(pages) for pages in (keys, values))
    )


def _dictionary_served(pages: SparsePages) -> bool:
    tables = [part for part in (pages.offline, pages.online) if part is not None]
    alike = tables[0].dtype == tables[-1].dtype and tables[0].dtype in ATOMS
    return alike and all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in tables)


def _pairs_served(pages: SparsePages) -> bool:
    kept = pages.bits is None and pages.coefficients.dtype in COEFFICIENTS
    return kept and pages.pairs <= MOST_PAIRS and pages.indices.is_contiguous() and pages.coefficients.is_contiguous()


def empty(*sizes: int, like: Tensor) -> Tensor:
    """Allocates an uninitialised float32 result."""
    return torch.empty(sizes, dtype=torch.float32, device=like.device)


def desparsify_attend(
    query: Tensor,
    keys: SparsePages,
    values: SparsePages,
    table: Tensor,
    used: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    back: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.desparsify_attend`, with an axis of splits: `top`, `mass [rows, kv_heads, splits, R]`, `mixed [..., R, D]`."""
    rows, heads, asked, channels = query.shape
    slots, pages = keys.indices.shape[2], table.shape[1]
    each = max(1, -(-pages * rows * heads // PROGRAMS))
    splits = max(1, -(-pages // each))
    top, mass = (empty(rows, heads, splits, asked, like=query) for _ in range(2))
    mixed = empty(rows, heads, splits, asked, values.chunks * values.width, like=query)
    half = 0 if cos_sin is None else cos_sin[0].shape[-1]
    cos, sin = (query, query) if cos_sin is None else (part.contiguous() for part in cos_sin)
    launch(
        _attend, (splits, heads, rows),
        query.float().contiguous(), keys.indices, keys.coefficients, *_dictionary(keys),
        values.indices, values.coefficients, *_dictionary(values), table, used, cos, sin,
        used if positions is None else positions, used if back is None else back.contiguous(), top, mass, mixed,
        heads, table.stride(0), table.stride(1), each * slots, keys.shared, keys.columns, values.shared, values.columns,
        1 if back is None else back.shape[1], keys.sparsity, values.sparsity, 1.0 if softcap is None else softcap,
        R=asked, SLOTS=slots, POSITIONS=positions is not None, BACK=back is not None, SOFTCAP=softcap is not None,
        **_shapes(asked, channels, half, keys, values, slots), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return top, mass, mixed


def _dictionary(pages: SparsePages) -> tuple[Tensor, Tensor]:
    """Offline and online atoms as kernel arguments; a missing table is replaced by the other one, which is not read through it."""
    offline, online = pages.offline, pages.online
    assert offline is not None or online is not None
    return (offline if offline is not None else online), (online if online is not None else offline)  # type: ignore[return-value]


def _shapes(
    rows: int, channels: int, half: int, keys: SparsePages, values: SparsePages, slots: int
) -> dict[str, int | bool | float]:
    """Constants of the kernel that follow from shapes and dtypes."""
    rest, chunks = channels - 2 * half, triton.next_power_of_2(values.chunks)
    widest = max(triton.next_power_of_2(channels), chunks * triton.next_power_of_2(values.width))
    return {
        "ROWS": max(16, triton.next_power_of_2(rows)),
        "BLOCK": 32 if slots % 32 == 0 and widest <= 128 else 16,
        "D": channels,
        "HALF": half,
        "HALVES": max(16, triton.next_power_of_2(half)),
        "REST": rest,
        "RESTS": max(16, triton.next_power_of_2(rest)),
        "KEY_PAIRS": keys.pairs,
        "KEY_BITS": keys.index_bits,
        "KEY_BYTES": keys.indices.shape[-1],
        "KEY_FLOAT8": keys.coefficients.dtype == torch.uint8,
        "KEY_OFFLINE": keys.shared > 0,
        "KEY_ONLINE": keys.columns > 0,
        "SPARSITY": values.sparsity,
        "CHUNKS": values.chunks,
        "WIDTH": values.width,
        "CHUNKS_2": chunks,
        "WIDTH_2": max(16 // chunks, triton.next_power_of_2(values.width)),
        "VALUE_BITS": values.index_bits,
        "VALUE_BYTES": values.indices.shape[-1],
        "VALUE_FLOAT8": values.coefficients.dtype == torch.uint8,
        "VALUE_OFFLINE": values.shared > 0,
        "VALUE_ONLINE": values.columns > 0,
        "KEY_UNROLL": _unroll(keys.sparsity, 4),
        "UNROLL": _unroll(values.sparsity, 2),
        "LEAST": LOWEST,
    }


def _unroll(pairs: int, most: int) -> int:
    """Pairs whose atoms are loaded at once: the largest divisor of `pairs` that is at most `most`."""
    return next(size for size in range(most, 0, -1) if pairs % size == 0)


def _specialisation(sparsity: int, atoms: int, columns: int, **changes: Any) -> Specialisation:
    """Llama's shape: 128 channels, 4 query rows of a KV head, values in two chunks, half-precision coefficients."""
    bits = (atoms + columns - 1).bit_length()

    def pages(pairs: int, chunks: int) -> SparsePages:
        size = bytes_per_token(pairs, bits)
        fields = (torch.empty(1, 1, 64, size, dtype=torch.uint8), torch.empty(1, 1, 64, pairs, dtype=torch.float16))
        offline = torch.empty(atoms, 128 // chunks, dtype=torch.float16)
        online = torch.empty(1, columns, 128 // chunks, dtype=torch.float16) if columns else None
        return SparsePages(*fields, pairs // chunks, chunks, offline, online)

    constants: dict[str, object] = dict(_shapes(4, 128, 64, pages(sparsity, 1), pages(sparsity, 2), 64))
    constants |= {"R": 4, "SLOTS": 64, "POSITIONS": False, "BACK": False, "SOFTCAP": False} | changes
    halves = ("key_coefficients", "key_offline", "key_online", "value_coefficients", "value_offline", "value_online")
    types = dict.fromkeys(_attend.arg_names, "i32") | dict.fromkeys(halves, "*fp16")
    types |= dict.fromkeys(("query", "cos", "sin", "top", "mass", "mixed"), "*fp32") | {"softcap": "fp32"}
    types |= dict.fromkeys(("key_indices", "value_indices"), "*u8")
    types |= dict.fromkeys(("table", "used", "positions"), "*i32") | {"back": "*i64"}
    return Specialisation(_attend, types, constants, WARPS, STAGES)


SPECIALISATIONS = {
    "csr 8 of 8192": _specialisation(8, 8192, 0),
    "csr 4 of 4096 + 2048, tiers": _specialisation(4, 4096, 2048, POSITIONS=True, BACK=True, SOFTCAP=True),
}
