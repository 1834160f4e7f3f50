"""Attention of a few query rows over the pages of a tier in one pass, where a kernel serves them.

On a CPU, and for what is not `served`, callers meet the same pages tile by tile (`reference.py`): both give the parts of one
running softmax.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.pack.reference import Widths

EXACT = 16
MOST_RANK = 16  # coefficients of a token: each is an operation of its own for a token and query row
STRIDE = 64  # places whose turns are another table's row


@dataclass(frozen=True)
class Ranked:
    """What tokens have beside their codes, as coefficients of a few vectors: x^ = D + A B (GEAR, arXiv:2403.05527, eq. 6).

    Args:
        coefficients: A, float16 or float32 `[pages, kv_heads or 1, page_tokens, r]`.
        basis: B, float32 `[rows or 1, kv_heads, r, D]`.
    """

    coefficients: Tensor
    basis: Tensor


@dataclass(frozen=True)
class PackedStream:
    """Keys or values of a tier in pages.

    Args:
        bits: of a code, or the widths of a word's fields, or `EXACT`: the tokens as the model made them.
        pages: words int16 `[pages, kv_heads, page_tokens, W]`, or exact tokens `[pages, kv_heads, page_tokens, D]`.
        channels: D; with `counts`, P * max(counts): queries are in plane form, and so is what is mixed (`kernels/pack/heads.py`).
        parameters: float16 `[pages, kv_heads or 1, page_tokens / g_t, 2 D / g_c]`, scales first; None: a code is its number.
        group_tokens: g_t.
        fixed: scale and zero point of all codes of a row's head or channel, where `parameters` is None: broadcast against
            `[rows, kv_heads, R, D]`.
        counts: words of each head, which lie side by side: pages are then `[pages, 1, page_tokens, sum(counts)]`. None: each
            head has a row of its own. What is mixed beyond a head's own words is finite and means nothing.
        ranked: what the tokens have beside, or None.
    """

    bits: int | Widths
    pages: Tensor
    channels: int
    parameters: Tensor | None = None
    group_tokens: int = 1
    fixed: tuple[Tensor, Tensor] | None = None
    counts: tuple[int, ...] | None = None
    ranked: Ranked | None = None


@dataclass(frozen=True)
class Turning:
    """Keys whose codes c are of components before RoPE: k_t = R_t (mean + size B^T (c_t - L / 2)), R_t the turn of place t and L
    the largest code of each component. Half-split RoPE of the first r channels.

    Args:
        axes: B, float16 `[kv_heads, N, D]`, D even: what a step of each component moves the channels, in units of `size`.
        size: float32 `[kv_heads, 1, 1]`.
        mean: float32 `[kv_heads, 1, D]`.
        coarse: cos and sin, float32 `[n, 2, r / 2]`, of the places of slots 0, `STRIDE`, 2 `STRIDE`, ... of all in the table; where
            tokens have `places`, of the places 0, `STRIDE`, ... up to the last that occurs.
        fine: float32 `[STRIDE, 2, r / 2]`: of the places 0 ... `STRIDE` - 1.
    """

    axes: Tensor
    size: Tensor
    mean: Tensor
    coarse: Tensor
    fine: Tensor


@dataclass(frozen=True)
class Stretch:
    """Which slots are read, by every row: int32 page numbers `table [rows, n]`, and `used [rows]` slots of them.

    Args:
        hidden: bool `[rows, kv_heads or 1, slots]`, slots that no query sees, or None.
        places: int32 `[pages, kv_heads, page_tokens, 1]`, the place of each token in its row; None: its slot.
        back: int32 `[rows, columns]`: a token at this place or before it is behind the sliding window of that column's query.
        bias: float32 `[rows, kv_heads, R, slots]` that is added to the scores, or None.
    """

    table: Tensor
    used: Tensor
    hidden: Tensor | None = None
    places: Tensor | None = None
    back: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """A part of a softmax, float32: the largest score `top`, `mass` = sum exp(score - top) `[rows, kv_heads, R, 1]`, `mixed` =
    sum exp(score - top) v `[rows, kv_heads, R, D]`, and the scores, -inf where hidden, of the rows that were asked for."""

    top: Tensor
    mass: Tensor
    mixed: Tensor
    scores: Tensor | None


def served(query_rows: int, keys: PackedStream | None, values: PackedStream | None, turning: bool = False) -> bool:
    """Whether a kernel reads these streams for so many query rows of a KV head, and turns the keys if it has to."""
    if keys is None or values is None or not prefers_triton(keys.pages.device):
        return False
    from calib.kernels.attend import triton

    return triton.serves(query_rows, keys, values, turning)


def attend_pages(
    query: Tensor,
    keys: PackedStream,
    values: PackedStream,
    stretch: Stretch,
    constant: Tensor | None = None,
    softcap: float | None = None,
    scored: bool = False,
    precise: bool = False,
    turning: Turning | None = None,
) -> Attended:
    """`query [rows, kv_heads, R, D]` float32, times the scale of the scores, against a tier that is `served`.

    The rows R of a KV head are group-major, then the columns of `stretch.back`. `constant [rows, kv_heads, R, 1]` is added to
    every score, which is then capped. With `scored` the scores are returned, `[rows, kv_heads, R, slots]`. Queries and weights are
    rounded to float16 where they meet codes, as a model in 16 bits rounds them; `precise` leaves them 22 bits. With `turning` the
    query is of D channels, and the `fixed` numbers of keys are those of their codes' middles.
    """
    from calib.kernels.attend import triton

    shared = None if keys.ranked is None else query @ keys.ranked.basis.mT
    if keys.fixed is not None and turning is None:
        scale, zero = keys.fixed
        added = (query * zero).sum(-1, keepdim=True)
        query, constant = query * scale, added if constant is None else constant + added
    with torch.cuda.device_of(query):  # Triton launches on the current device
        found = triton.attend_pages(query, keys, values, stretch, constant, softcap, scored, precise, turning, shared)
    mixed, coefficients = found.mixed[..., : values.channels], found.mixed[..., values.channels :]
    if values.fixed is not None:
        scale, zero = values.fixed
        mixed = mixed * scale + found.mass * zero
    if values.ranked is not None:
        mixed = mixed + coefficients @ values.ranked.basis
    return replace(found, mixed=mixed)
