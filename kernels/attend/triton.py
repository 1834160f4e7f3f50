"""Launches `decode_kernel.py` and `merge_kernel.py`: which streams they support, and how the work is split into programs."""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from calib.kernels.attend.decode_kernel import attend
from calib.kernels.attend.merge_kernel import merge
from calib.kernels.attend.options import (
    CHANNEL,
    LEAST,
    TOKEN,
    groups_of,
    merge_constants,
    merge_warps,
    mode_of,
    rank_of,
    runs_of,
    turn_of,
    wide_of,
    widths_of,
)
from calib.kernels.attend.options import PROGRAMS as PROGRAMS
from calib.kernels.attend.options import columns_of as columns_of
from calib.kernels.attend.packed_pages import EXACT, MOST_RANK, Attended, CodeFold, PackedStream, PageSpan, RopeTables
from calib.kernels.attend.page_launch import PageLaunch, coefficients_of, strides_of, vectors_of
from calib.kernels.attend.specialisations import SPECIALISATIONS as SPECIALISATIONS
from calib.kernels.launch import launch
from calib.kernels.outliers.page_terms import PageTerms
from calib.kernels.outliers.triton import add_to_mixtures

# Most query rows of a KV head that are supported: more occur in prompts, not in decode steps.
MOST_ROWS = 256


def supports(query_rows: int, keys: PackedStream, values: PackedStream, rope_tables: bool = False) -> bool:
    """Whether the kernel supports these streams and up to `MOST_ROWS` query rows. Cached with the keys.

    Supported are codes of any widths and exact tokens; float16 parameters per token for groups of channels that are whole planes,
    or per channel for groups of at least 16 tokens or of a page; no parameters where all heads share a row of words (`counts`).
    An even number of float16 low-rank coefficients must be aligned to 4 bytes, as float16 parameters must.
    `scales` only of values with parameters per token. Keys that are rotated (`rope_tables`) must be codes without parameters,
    and a page a multiple of `LEAST` tokens.
    `sizes` only of such keys, and of values that are codes without parameters."""
    if query_rows > MOST_ROWS:
        return False
    key = (supports, values, rope_tables)
    if key not in keys.worked_out:
        keys.worked_out[key] = _reads(keys, values, rope_tables)
    found: bool = keys.worked_out[key]
    return found


def _reads(keys: PackedStream, values: PackedStream, rope_tables: bool) -> bool:
    """`supports` without the check of the number of query rows."""
    if rope_tables and (not _are_plain_codes(keys) or keys.pages.shape[2] % LEAST):
        return False
    if keys.ranked is not None and (rope_tables or keys.counts is not None):  # the vectors' order is that of channels
        return False
    if (keys.sizes is not None and not rope_tables) or (values.sizes is not None and not _are_plain_codes(values)):
        return False
    sizes = [stream.sizes for stream in (keys, values) if stream.sizes is not None]
    if len({(part.shape[-1], part.stride()) for part in sizes}) > 1:  # the kernel computes one offset for both
        return False
    if keys.scales is not None or (values.scales is not None and mode_of(values) != TOKEN):
        return False
    return _read(keys) and _read(values) and turn_of(keys, values) >= LEAST


def attend_pages(
    query: Tensor,
    keys: PackedStream,
    values: PackedStream,
    span: PageSpan,
    constant: Tensor | None,
    softcap: float | None,
    scored: bool,
    precise: bool,
    rope_tables: RopeTables | None = None,
    mixes_keys: bool = False,
    ahead: int = 0,
    scale: float = 1.0,
    fold: CodeFold | None = None,
    runs: bool = False,
    terms: PageTerms | None = None,
) -> Attended:
    """As `operation.attend_pages`. `mixed` has the columns of `options.columns_of`, or with `fold` the channels. `fixed` of values
    with sizes is not applied; the caller has to."""
    rows, heads, asked, _ = query.shape
    same = PageLaunch.over(keys, values, asked, softcap, rope_tables, mixes_keys)
    pages, wide = span.table.shape[1], sum(same.columns)
    programs = _programs(query.device) * same.programs // PROGRAMS
    run, splits = runs_of(pages * same.turns, programs // (rows * heads * same.blocks))
    slots = pages * keys.pages.shape[2]
    each, device = (rows, heads, splits, asked) if splits > 1 else (rows, heads, asked), query.device
    top, mass, mixed = room((*each, 1), device), room((*each, 1), device), room((*each, wide), device)
    scored = scored or (terms is not None and terms.of_tokens)
    wanted = slots * scored + ahead
    scores = room((rows * heads * asked * wanted,), device) if wanted else None
    launch(
        attend, (splits, rows * heads, same.blocks),
        query.contiguous(), *same.pages, span.table, span.used.contiguous(),
        constant if constant is None else constant.contiguous(),
        span.bias if span.bias is None else span.bias.contiguous(),
        None if span.hidden is None else span.hidden.view(torch.uint8), span.positions,
        None if span.back is None else span.back.contiguous(),
        *same.maps, *_tables(rope_tables), *same.coefficients,
        top, mass, mixed, scores,
        scale, heads, asked, 1 if span.back is None else span.back.shape[1], span.table.stride(0), run, slots, ahead,
        *same.page_strides, *strides_of(span.hidden), *strides_of(span.positions), *same.other_strides, **same.options,
        HAS_CONSTANT=constant is not None, HAS_BIAS=span.bias is not None, HAS_HIDDEN=span.hidden is not None,
        HAS_POSITIONS=span.positions is not None, HAS_BACK=span.back is not None, HAS_SCORES=scored,
        HAS_AHEAD=ahead > 0, PRECISE=precise,
    )  # fmt: skip
    told = {} if scores is None else _told(scores, (rows, heads, asked), slots * scored)
    if terms is not None:
        runs_apart = (rows, heads, splits, asked)
        add_to_mixtures(
            (top.view(runs_apart), mixed.view(*runs_apart, wide)), told["scores"] if terms.of_tokens else None, terms,
            vectors_of(values), span.table, span.used, keys.pages.shape[2], run, same.turn, values.channels, same.maps[6],
        )  # fmt: skip
    if splits > 1 and runs:
        return Attended(top, mass, mixed, **told)
    if splits > 1 or fold is not None:
        parts, each = (top, mass, mixed), (rows, heads, asked)
        channels = 0 if fold is None else fold.axes.shape[2]
        wide = wide if fold is None else channels
        top, mass, mixed = room((*each, 1), device), room((*each, 1), device), room((*each, wide), device)
        launch(
            merge,
            (rows * heads, asked),
            *parts,
            top,
            mass,
            mixed,
            *_folding(fold),
            splits,
            asked,
            heads,
            **merge_constants(same.columns, channels),
            num_warps=merge_warps(fold is not None),
        )
    return Attended(top, mass, mixed, **told)


def _told(scores: Tensor, of_rows: tuple[int, ...], slots: int) -> dict[str, Tensor]:
    """Views of one allocation as `scores` (its first `slots` numbers per query row) and `ahead` (the rest), those that exist."""
    end = slots * prod(of_rows)
    parts = (
        {"scores": scores[:end], "ahead": scores[end:]}
        if 0 < end < len(scores)
        else {"scores" if end else "ahead": scores}
    )
    return {name: part.view(*of_rows, -1) for name, part in parts.items()}


def room(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocates an uninitialised output tensor."""
    return torch.empty(*shape, dtype=dtype, device=device)  # faster than with a tuple


def _read(stream: PackedStream) -> bool:
    coefficients = coefficients_of(stream)
    held = (stream.pages, stream.parameters, coefficients, stream.scales, stream.sizes)
    if rank_of(stream) > MOST_RANK or not all(map(_by_token, held)):
        return False
    if coefficients is not None and not _singly(coefficients) and not _in_pairs(coefficients):
        return False
    if stream.bits == EXACT:
        return stream.pages.dtype in (torch.float16, torch.bfloat16, torch.float32) and stream.parameters is None
    if stream.parameters is None:
        return stream.channels > 0
    if stream.counts is not None or stream.parameters.dtype != torch.float16:
        return False
    if not _in_pairs(stream.parameters):
        return False
    if mode_of(stream) == CHANNEL:
        return stream.parameters.shape[-1] == 2 * stream.channels
    count, groups = len(widths_of(stream)), groups_of(stream)
    return groups == 1 or (count % groups == 0 and count * wide_of(stream) == stream.channels)


def _are_plain_codes(stream: PackedStream) -> bool:
    return stream.bits != EXACT and stream.parameters is None


def _by_token(pages: Tensor | None) -> bool:
    """Whether tokens are contiguous, each with its numbers side by side. (On a CPU pages have tokens last.)"""
    if pages is None:
        return True
    (_, _, rows, width), (_, _, row, number) = pages.shape, pages.stride()
    return (rows == 1 or row == width) and (width == 1 or number == 1)


def _singly(coefficients: Tensor) -> bool:
    """Whether the kernel reads a token's coefficients one by one, not in pairs (`loads.token_coefficients`)."""
    return coefficients.dtype != torch.float16 or coefficients.shape[-1] % 2 == 1


def _in_pairs(numbers: Tensor) -> bool:
    """Whether every token's float16 numbers, which the kernel reads two at once, are aligned to 4 bytes."""
    return numbers.data_ptr() % 4 == 0 and all(step % 2 == 0 for step in numbers.stride()[:2])


def _folding(fold: CodeFold | None) -> tuple[Tensor | None, ...]:
    """Arguments AXES, SIZE, ORIGIN, MEAN, TABLE, UNIT and LARGEST of `merge_kernel.merge`."""
    if fold is None:
        return (None,) * 7
    told = fold.predicted
    predicted = (None,) * 3 if told is None else (told.table, told.unit, told.largest)
    return fold.axes, fold.size, fold.origin, fold.mean, *predicted


def _tables(rope_tables: RopeTables | None) -> tuple[Tensor | None, ...]:
    """Arguments AXES, MEAN, SIZE, COARSE and FINE of `decode_kernel.attend`."""
    if rope_tables is None:
        return (None,) * 5
    return rope_tables.axes, rope_tables.mean, rope_tables.size, rope_tables.coarse, rope_tables.fine


def fills(device: torch.device) -> int:
    """Number of programs of several warps that fill the device."""
    return _programs(device) // 2


@lru_cache
def _programs(device: torch.device) -> int:
    """Number of programs that fill the device; 8 in the interpreter, which runs them one by one, so that the merge is tested."""
    if device.type != "cuda":
        return 8
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
