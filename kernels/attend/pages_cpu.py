"""Calls `pages.c`: attention of a few query rows over the packed pages of a tier in one pass, on a CPU.

On a CPU pages have tokens last: word w of all tokens of a page is one contiguous run. Pages are read through the page table,
without a copy."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import EXACT, STRIDE, Attended, CodeFold, PackedStream, PageSpan, RopeTables
from calib.kernels.compiled import library_of_rows
from calib.kernels.dispatch import prefers_compiled
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import Widths, first_bits, pattern, words_per_token

SOURCE = Path(__file__).with_name("pages.c")
MOST_ROWS, MOST_CHANNELS, MOST_PAGE, LEAST_GROUP, TILE = 8, 512, 512, 8, 32  # as in pages.c
NONE, TOKEN, CHANNEL = 0, 1, 2  # modes of parameters: none, per token, per channel


class _Table(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "channel")))


class _Stream(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "down", "begins", "numbers", "scales", "sizes")),
        ("scale", _Table),
        ("zero", _Table),
        *((name, ctypes.c_int64) for name in ("page", "head", "word", "field")),
        *((name, ctypes.c_int64) for name in ("numbers_page", "numbers_head", "numbers_column")),
        *((name, ctypes.c_int64) for name in ("scales_page", "scales_head", "scales_channel")),
        *((name, ctypes.c_int64) for name in ("sizes_page", "sizes_word")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("wide", "channels", "size_words", "size_bytes"),
                *("mode", "groups", "block", "trellis", "fields"),
            )
        ),
        ("widths", ctypes.c_int32 * 16),
        ("masks", ctypes.c_int32 * 16),
        ("units", ctypes.c_float * 16),
    )


class _Turn(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("axes", "size", "mean", "coarse", "fine", "middles")),
        ("head_dim", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
    )


class _Fold(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("back", "size", "origin", "mean", "table", "unit", "largest")),
        ("head_dim", ctypes.c_int32),
    )


class _Asked(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "used", "query", "constant")),
        ("table_row", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "page", "width", "ahead")),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("top", "mass", "mixed", "ahead_scores")),
    )


def supports(query_rows: int, keys: PackedStream, values: PackedStream, rope_tables: bool = False) -> bool:
    """Whether `attend_pages` supports these streams and `query_rows` query rows per KV head.

    Supported are codes of any widths, without parameters or with float16 parameters per token or per channel of at least 8 tokens,
    whose groups divide the channels; `scales` only with parameters per token. Keys that are rotated (`rope_tables`) must be codes
    without parameters, in pages of whole tiles. `sizes` only of such keys, and of values that are codes without parameters."""
    page = keys.pages.shape[2]
    if (
        not prefers_compiled(keys.pages.device)
        or not 0 < query_rows <= MOST_ROWS
        or not LEAST_GROUP <= page <= MOST_PAGE
    ):
        return False
    if rope_tables and (keys.parameters is not None or page % TILE):
        return False
    if (keys.sizes is not None and not rope_tables) or (values.sizes is not None and values.parameters is not None):
        return False
    return all(map(_is_read, (keys, values))) and library_of_rows(SOURCE, query_rows) is not None


def _is_read(stream: PackedStream) -> bool:
    held = (stream.pages, stream.parameters, stream.scales, stream.sizes)
    if (
        stream.bits == EXACT
        or stream.ranked is not None
        or stream.channels > MOST_CHANNELS
        or not all(map(_by_channel, held))
    ):
        return False
    if stream.parameters is None:
        return stream.scales is None
    mode, groups = _mode(stream), stream.parameters.shape[3] // 2
    fits = stream.parameters.dtype == torch.float16 and stream.channels % groups == 0 and stream.counts is None
    if mode == CHANNEL:
        return fits and stream.scales is None and stream.group_tokens >= LEAST_GROUP
    return fits and (stream.scales is None or stream.scales.dtype == torch.float16)


def _by_channel(pages: Tensor | None) -> bool:
    """Whether tokens are contiguous (or one per page), in an ordinary tensor, not a tracer's."""
    return pages is None or (type(pages) is Tensor and (pages.shape[2] == 1 or pages.stride(2) == 1))


def _mode(stream: PackedStream) -> int:
    if stream.parameters is None:
        return NONE
    return TOKEN if stream.group_tokens == 1 else CHANNEL


def attend_pages(
    query: Tensor,
    keys: PackedStream,
    values: PackedStream,
    span: PageSpan,
    constant: Tensor | None,
    softcap: float | None,
    rope_tables: RopeTables | None = None,
    fold: CodeFold | None = None,
    ahead: int = 0,
) -> Attended:
    """As `operation.attend_pages`, for spans of the rows' first slots only."""
    rows, heads, asked, _ = query.shape
    top, mass = (query.new_empty(rows, heads, asked, 1) for _ in range(2))
    wide = values.channels if fold is None else fold.axes.shape[2]
    mixed = query.new_empty(rows, heads, asked, wide)
    scores = query.new_empty(rows, heads, asked, ahead) if ahead else None
    kept = [None if part is None else part.contiguous() for part in (query, constant, span.used)]
    request = _Asked(
        span.table.data_ptr(), _at(kept[2]), _at(kept[0]), _at(kept[1]), span.table.stride(0), rows, heads, keys.pages.shape[2],
        span.table.shape[1], ahead, softcap or 0.0, _at(top), _at(mass), _at(mixed), _at(scores),
    )  # fmt: skip
    turn = None if rope_tables is None else _turn(keys, rope_tables)
    found = _function(asked)(
        _stream(keys, query if rope_tables is None else None),
        _stream(values, query if fold is None else None),
        turn,
        None if fold is None else _fold(fold),
        request,
        torch.get_num_threads(),
    )
    if found:
        raise MemoryError("no memory for the parts of a softmax")
    return Attended(top, mass, mixed, None, scores)


def _at(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()


def _stream(stream: PackedStream, of: Tensor | None) -> _Stream:
    """The C struct of a stream. `fixed` scales and zero points are expanded to the rows and heads of the query `of`; if it is None,
    they are not used."""
    pages, numbers, scales, sizes = stream.pages, stream.parameters, stream.scales, stream.sizes
    begins = None if stream.counts is None else first_words(stream.counts, pages.device)
    found = _Stream(
        _at(pages), None, _at(begins), _at(numbers), _at(scales), _at(sizes), *_tables(stream, of),
        pages.stride(0), pages.stride(1), pages.stride(3), 0,
        *_strides(numbers), *_strides(scales),
        *((0, 0) if sizes is None else (sizes.stride(0), sizes.stride(3))),
        words_per_token(stream.channels, stream.bits), stream.channels,
        *((0, 0) if sizes is None else (sizes.shape[3], sizes.itemsize)),
        _mode(stream), 1 if numbers is None else numbers.shape[3] // 2, stream.group_tokens, stream.trellis,
        len(pattern(stream.bits)), *_fields(stream.bits),
    )  # fmt: skip
    return found


def _tables(stream: PackedStream, of: Tensor | None) -> tuple[_Table, _Table]:
    if of is None or stream.fixed is None:
        return _Table(), _Table()
    scale, zero = (_table(part.expand(of.shape[0], of.shape[1], 1, stream.channels)) for part in stream.fixed)
    return scale, zero


def _table(part: Tensor) -> _Table:
    return _Table(_at(part), part.stride(0), part.stride(1), part.stride(3))


def _strides(part: Tensor | None) -> tuple[int, int, int]:
    """Strides of pages, heads and columns; that of heads is 0 if all heads share the numbers."""
    if part is None:
        return 0, 0, 0
    return part.stride(0), 0 if part.shape[1] == 1 else part.stride(1), part.stride(3)


@cache
def _fields(bits: int | Widths) -> "tuple[ctypes.Array[Any], ...]":
    """Widths and masks of a word's fields, and the factors 2^-(first bit) that undo their position."""
    widths, masks, units = (ctypes.c_int32 * 16)(), (ctypes.c_int32 * 16)(), (ctypes.c_float * 16)()
    for number, (width, first) in enumerate(zip(pattern(bits), first_bits(bits), strict=True)):
        widths[number], masks[number], units[number] = width, ((1 << width) - 1) << first, 2.0**-first
    return widths, masks, units


def _turn(keys: PackedStream, tables: RopeTables) -> _Turn:
    parts = tables.axes, tables.size, tables.mean, tables.coarse, tables.fine
    assert all(part.is_contiguous() for part in parts) and tables.fine.shape[0] == STRIDE
    middles = _middles(keys.bits, keys.channels, keys.trellis)
    return _Turn(*map(_at, parts), ctypes.addressof(middles), tables.axes.shape[2], tables.fine.shape[2])


@cache
def _middles(bits: int | Widths, channels: int, trellis: bool) -> "ctypes.Array[ctypes.c_float]":
    """Half of the largest code of each component."""
    wide = words_per_token(channels, bits)
    each = [(2.0 ** (width + trellis) - 1) / 2 for width in pattern(bits) for _ in range(wide)]
    return (ctypes.c_float * channels)(*each[:channels])


def _fold(fold: CodeFold) -> _Fold:
    told = fold.predicted
    predicted = (None,) * 3 if told is None else (told.table, told.unit, told.largest)
    parts = fold.axes, fold.size, fold.origin, fold.mean, *predicted
    assert all(part is None or part.is_contiguous() for part in parts)
    return _Fold(*map(_at, parts), fold.axes.shape[2])


@cache
def _function(rows: int) -> Any:
    found = library_of_rows(SOURCE, rows)
    assert found is not None
    pointers = (ctypes.POINTER(kind) for kind in (_Stream, _Stream, _Turn, _Fold, _Asked))
    found.attend_pages.argtypes = [*pointers, ctypes.c_int]
    found.attend_pages.restype = ctypes.c_int
    return found.attend_pages
