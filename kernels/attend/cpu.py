"""Calls `codes.c`: products of a few query rows (or weights) with packed codes, on a CPU.

Words are int16 `[batch or 1, kv_heads or 1, W, T]`, tokens contiguous. With `counts` the words of all heads lie in one row
(`kernels/pack/heads.py`); with `bits` None every word is an integer itself. All else is float32. The result of a batch row depends
on neither the other rows nor the number of threads.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from calib.kernels.compiled import library_of_rows
from calib.kernels.dispatch import prefers_compiled
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import Widths, first_bits, pattern, words_per_token

MOST_ROWS, MOST_CHANNELS, AXES = 8, 512, 8  # as in codes.c
SOURCE = Path(__file__).with_name("codes.c")


class _Codes(ctypes.Structure):
    _fields_ = (
        ("words", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride", "word_stride")),
        *((name, ctypes.c_int32) for name in ("items", "heads", "wide", "channels", "tokens")),
        ("masks", ctypes.c_int32 * 16),
        ("units", ctypes.c_float * 16),
    )


def serves(rows: Tensor, words: Tensor, channels: int | None = None) -> bool:
    """Whether the C functions support these `rows [batch, kv_heads, R, ...]` of queries, or of weights for so many `channels`, with
    `words`."""
    return (
        rows.ndim == words.ndim == 4
        and (rows.dtype, words.dtype) == (torch.float32, torch.int16)
        and 0 < rows.shape[2] <= MOST_ROWS
        and 0 < (rows.shape[3] if channels is None else channels) <= MOST_CHANNELS
        and words.shape[3] > 0
        and words.stride(3) == 1
        and words.shape[0] in (1, rows.shape[0])
        and prefers_compiled(rows.device)
        and _is_plain(rows)
        and _is_plain(words)
        and library_of_rows(SOURCE, rows.shape[2]) is not None
    )


def _is_plain(part: Tensor) -> bool:
    """Whether `part` is an ordinary tensor, not a tracer's, that requires no gradient."""
    return type(part) is Tensor and not part.requires_grad


def code_scores(
    query: Tensor,
    words: Tensor,
    bits: int | Widths | None,
    counts: tuple[int, ...] | None = None,
    groups: int = 1,
    block: int | None = None,
    scales: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Scores: sum of q s c over the channels of each group: `query [batch, heads, R, D]` -> `[batch, heads, groups, R, T]`.

    The scales s are `scales [batch, heads, blocks, D]` for blocks of `block` tokens, or 1; `start [batch, heads, R, blocks]` is
    added. Raises ValueError if the blocks of `scales` do not make up the tokens.
    """
    batch, heads, rows, channels = query.shape
    out = query.new_empty(batch, heads, groups, rows, words.shape[-1])
    codes = _codes(words, bits, counts, batch, heads, channels)
    scales = _of_all(scales, batch, heads, words.shape[-1], block)
    held = [None if part is None else part.contiguous() for part in (query, scales, start)]
    _function("code_scores", rows)(
        codes, groups, block or words.shape[-1], *map(_at, (*held, out)), torch.get_num_threads()
    )
    return out


def code_mix(
    weights: Tensor,
    words: Tensor,
    bits: int | Widths | None,
    channels: int,
    counts: tuple[int, ...] | None = None,
    block: int | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Mixture sum_t p_t s c_t: `weights [batch, heads, groups, R, T]` by groups of channels -> `[batch, heads, R, D]`.

    The scales s are `scales [batch, heads, blocks, D]` for blocks of `block` tokens, or 1. Raises ValueError as `code_scores`.
    """
    batch, heads, groups, rows, tokens = weights.shape
    out = weights.new_empty(batch, heads, rows, channels)
    codes = _codes(words, bits, counts, batch, heads, channels)
    scales = _of_all(scales, batch, heads, words.shape[-1], block)
    held = [None if part is None else part.contiguous() for part in (weights, scales)]
    _function("code_mix", rows)(codes, groups, block or tokens, *map(_at, (*held, out)), torch.get_num_threads())
    return out


def rotated_scores(
    query: Tensor,
    words: Tensor,
    bits: int | Widths | None,
    counts: tuple[int, ...] | None,
    matrix: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: Tensor | None = None,
) -> Tensor:
    """Scores with keys rebuilt from components and rotated, q R_t M (s c, s, 1), or q R_t M (c, 1) without `sizes` s.

    `query [batch, heads, R, D]`, M = `matrix [heads, D, components + 1 or 2]` -> `[batch, heads, R, T]`. The rotation R_t is given
    by `cos` and `sin [batch or 1, heads or 1, pairs, T]`; `sizes [batch, heads, 1, T]`.
    """
    batch, heads, rows, head_dim = query.shape
    out = query.new_empty(batch, heads, rows, words.shape[-1])
    channels = words.shape[2] if bits is None or counts is None else len(pattern(bits)) * max(counts)
    codes = _codes(words, bits, counts, batch, heads, channels)
    query, matrix, cos, sin = (part.contiguous() for part in (query, matrix.mT, cos, sin))
    sizes = None if sizes is None else sizes.contiguous()
    strides = [0 if cos.ndim < axis or cos.shape[-axis] == 1 else cos.stride(-axis) for axis in (4, 3)]
    _function("rotated_scores", rows)(
        codes, _at(query), head_dim, _at(matrix), matrix.shape[-2], _at(sizes), _at(cos), _at(sin), *strides, cos.shape[-2],
        _at(out), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _of_all(scales: Tensor | None, batch: int, heads: int, tokens: int, block: int | None) -> Tensor | None:
    """Expands `scales` to every batch row. Raises ValueError if `block` does not fit: the C code derives their number from it."""
    if scales is None:
        return None
    if block is None or block * scales.shape[2] != tokens:
        raise ValueError(
            f"got {scales.shape[2]} scales for {tokens} tokens in blocks of {block}, expected one for each block"
        )
    return scales.expand(batch, heads, -1, -1)


def _at(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()


@cache
def _function(name: str, rows: int) -> "ctypes._NamedFuncPointer":
    found = library_of_rows(SOURCE, rows)
    assert found is not None
    function = getattr(found, name)
    pointer, whole, stride = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    codes = ctypes.POINTER(_Codes)
    function.argtypes = {
        "code_scores": [codes, whole, whole, pointer, pointer, pointer, pointer, whole],
        "code_mix": [codes, whole, whole, pointer, pointer, pointer, whole],
        "rotated_scores": [
            codes, pointer, whole, pointer, whole, pointer, pointer, pointer, stride, stride, whole, pointer, whole,
        ],
    }[name]  # fmt: skip
    function.restype = None
    return function


@cache
def _fields(bits: int | Widths | None) -> "tuple[ctypes.Array[ctypes.c_int32], ctypes.Array[ctypes.c_float]]":
    """Masks of a word's fields, and the factors 2^-(first bit) that undo their position."""
    masks, units = (ctypes.c_int32 * 16)(), (ctypes.c_float * 16)()
    if bits is None:
        masks[0], units[0] = -1, 1.0
        return masks, units
    for number, (width, first) in enumerate(zip(pattern(bits), first_bits(bits), strict=True)):
        masks[number], units[number] = ((1 << width) - 1) << first, 2.0**-first
    return masks, units


def _codes(
    words: Tensor, bits: int | Widths | None, counts: tuple[int, ...] | None, batch: int, heads: int, channels: int
) -> _Codes:
    begins = None if counts is None else first_words(counts, words.device)
    wide = channels if bits is None else words_per_token(channels, bits)
    row, head = (0 if size == 1 else stride for size, stride in zip(words.shape[:2], words.stride()[:2], strict=True))
    sizes = (row, head, words.stride(2), batch * heads, heads, wide, channels, words.shape[-1])
    return _Codes(words.data_ptr(), _at(begins), *sizes, *_fields(bits))
