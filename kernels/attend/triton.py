"""Launches `decode_kernel.py` and `merge_kernel.py`: what they serve, and in how many programs."""

from functools import lru_cache
from math import prod

import torch
import triton
from torch import Tensor

from calib.kernels.attend.decode_kernel import attend
from calib.kernels.attend.merge_kernel import merge
from calib.kernels.attend.options import (
    CHANNEL,
    LEAST,
    TOKEN,
    block_of,
    constants_of,
    groups_of,
    maps_of,
    merge_constants,
    merge_warps,
    mode_of,
    rank_of,
    runs_of,
    stages_of,
    turn_of,
    warps_of,
    wide_of,
    widths_of,
)
from calib.kernels.attend.options import PROGRAMS as PROGRAMS
from calib.kernels.attend.options import columns_of as columns_of
from calib.kernels.attend.packed_pages import EXACT, MOST_RANK, Attended, CodeFold, PackedStream, PageSpan, RopeTables
from calib.kernels.attend.specialisations import SPECIALISATIONS as SPECIALISATIONS
from calib.kernels.outliers.page_terms import PageTerms
from calib.kernels.outliers.triton import add_to_mixtures
from calib.kernels.pack.heads import first_words

# Query rows of a KV head that are served: more are a prompt's, not a step's.
MOST_ROWS = 256


def supports(query_rows: int, keys: PackedStream, values: PackedStream, rope_tables: bool = False) -> bool:
    """Whether the kernel reads these streams: codes of any widths, or exact; float16 parameters whose groups are whole planes of
    channels, or of each channel for 16 and more tokens, or a page; none where heads lie side by side. Scales of each page's
    channels beside tokens' parameters, of values alone. Keys that it is to turn are codes without parameters. Sizes of tokens: of
    such keys, and of values that are codes without parameters."""
    if rope_tables and not (_are_plain_codes(keys) and keys.ranked is None):
        return False
    if (keys.sizes is not None and not rope_tables) or (values.sizes is not None and not _are_plain_codes(values)):
        return False
    sizes = [stream.sizes for stream in (keys, values) if stream.sizes is not None]
    if len({(part.shape[-1], part.stride()) for part in sizes}) > 1:  # one offset is computed for both
        return False
    if keys.scales is not None or (values.scales is not None and mode_of(values) != TOKEN):
        return False
    return query_rows <= MOST_ROWS and _read(keys) and _read(values) and turn_of(keys, values) >= LEAST


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
    """See `operation.attend_pages`. What is mixed has the columns of `options.columns_of`, or with `fold` channels in place of the
    first two; what is `fixed` of values that have sizes is the caller's."""
    (rows, heads, asked, _), page = query.shape, keys.pages.shape[2]
    block = block_of(asked, sized=values.sizes is not None)
    turn = turn_of(keys, values, block, rope_tables)
    turns = span.table.shape[1] * triton.cdiv(page, turn)
    blocks = triton.cdiv(asked, block)
    run, splits = runs_of(turns, _programs(query.device) // (rows * heads * blocks))
    slots = span.table.shape[1] * page
    columns = columns_of(keys, values, mixes_keys)
    wide = sum(columns)
    top, mass = (room((rows, heads, splits, asked), query) for _ in range(2))
    mixed = room((rows, heads, splits, asked, wide), query)
    scored = scored or (terms is not None and terms.of_tokens)
    widths = [slots * scored, ahead]
    scores = room((rows * heads * asked * sum(widths),), query) if any(widths) else None
    of_keys, of_values = maps_of(keys, rope_tables is None), maps_of(values, values.sizes is None)
    attend[(splits, rows * heads, blocks)](
        query.contiguous(), keys.pages, _numbers(keys), _first(keys), values.pages, _numbers(values), _first(values),
        span.table, span.used.contiguous(),
        constant if constant is None else constant.contiguous(),
        span.bias if span.bias is None else span.bias.contiguous(),
        None if span.hidden is None else span.hidden.view(torch.uint8), span.positions,
        None if span.back is None else span.back.contiguous(),
        *of_keys, *of_values, *_tables(rope_tables),
        _coefficients(keys), vectors_of(keys), _coefficients(values), values.scales,
        keys.sizes, values.sizes,
        top, mass, mixed, scores,
        scale, heads, asked, 1 if span.back is None else span.back.shape[1], span.table.stride(0), run, slots, ahead,
        *_strides(keys.pages), *_strides(keys.parameters), *_strides(values.pages), *_strides(values.parameters),
        *_strides(span.hidden), *_strides(span.positions), *_strides(_coefficients(keys)), *_vector_strides(keys),
        *_strides(_coefficients(values)),
        *_strides(values.scales), _strides(keys.sizes if values.sizes is None else values.sizes)[0],
        *_map_strides(of_keys), *_map_strides(of_values),
        **constants_of(keys, values, block, turn, softcap, rope_tables, mixes_keys=mixes_keys),
        HAS_CONSTANT=constant is not None, HAS_BIAS=span.bias is not None, HAS_HIDDEN=span.hidden is not None,
        HAS_POSITIONS=span.positions is not None, HAS_BACK=span.back is not None, HAS_SCORES=scored,
        HAS_AHEAD=ahead > 0, PRECISE=precise,
        num_warps=warps_of(block, keys, values, rope_tables), num_stages=stages_of(keys, values, rope_tables),
    )  # fmt: skip
    told = _told(scores, (rows, heads, asked), widths)
    if terms is not None:
        add_to_mixtures(
            (top, mixed), told["scores"] if terms.of_tokens else None, terms, vectors_of(values), span.table, span.used, page, run,
            turn, values.channels, of_values[2],
        )  # fmt: skip
    if splits > 1 and runs:
        return Attended(top[..., None], mass[..., None], mixed, **told)
    if splits > 1 or fold is not None:
        parts, (top, mass) = (top, mass, mixed), (room((rows, heads, 1, asked), query) for _ in range(2))
        channels = 0 if fold is None else fold.axes.shape[2]
        mixed = room((rows, heads, 1, asked, wide if fold is None else channels + sum(columns[2:])), query)
        folding = (None,) * 4 if fold is None else (fold.axes, fold.size, fold.origin, fold.mean)
        merge[(rows * heads, asked)](
            *parts,
            top,
            mass,
            mixed,
            *folding,
            splits,
            asked,
            heads,
            **merge_constants(columns, channels),
            num_warps=merge_warps(fold is not None),
        )
    return Attended(top[:, :, 0, :, None], mass[:, :, 0, :, None], mixed[:, :, 0], **told)


def _told(scores: Tensor | None, of_rows: tuple[int, ...], widths: list[int]) -> dict[str, Tensor | None]:
    """Of one memory the scores of all slots and of those ahead, where there are any."""
    if scores is None:
        return {"scores": None}
    parts = scores.split([width * prod(of_rows) for width in widths])
    found = (part.view(*of_rows, width) if width else None for part, width in zip(parts, widths, strict=True))
    return dict(zip(("scores", "ahead"), found, strict=True))


def room(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Where a kernel writes."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _read(stream: PackedStream) -> bool:
    held = (stream.pages, stream.parameters, _coefficients(stream), stream.scales, stream.sizes)
    if rank_of(stream) > MOST_RANK or not all(map(_by_token, held)) or (stream.ranked and stream.counts):
        return False
    if stream.bits == EXACT:
        return stream.pages.dtype in (torch.float16, torch.bfloat16, torch.float32) and stream.parameters is None
    if stream.parameters is None:
        return stream.channels > 0
    if stream.counts is not None or stream.parameters.dtype != torch.float16:
        return False
    if mode_of(stream) == CHANNEL:
        return stream.parameters.shape[-1] == 2 * stream.channels
    count, groups = len(widths_of(stream)), groups_of(stream)
    return groups == 1 or (count % groups == 0 and count * wide_of(stream) == stream.channels)


def _are_plain_codes(stream: PackedStream) -> bool:
    return stream.bits != EXACT and stream.parameters is None


def _by_token(pages: Tensor | None) -> bool:
    """Whether each token's numbers lie side by side, and tokens behind each other: on a CPU pages lie as plain torch reads them."""
    if pages is None:
        return True
    (_, _, rows, width), (_, _, row, number) = pages.shape, pages.stride()
    return (rows == 1 or row == width) and (width == 1 or number == 1)


def _coefficients(stream: PackedStream) -> Tensor | None:
    return None if stream.ranked is None else stream.ranked.coefficients


def vectors_of(stream: PackedStream) -> Tensor | None:
    """What tokens have coefficients of, each vector's channels side by side and behind those of the one before."""
    if stream.ranked is None:
        return None
    basis, side_by_side = stream.ranked.basis, (stream.ranked.basis.shape[-1], 1)
    return basis if basis.stride()[2:] == side_by_side else basis.contiguous()


def _vector_strides(stream: PackedStream) -> tuple[int, int]:
    """Of rows, which may share vectors, and of heads."""
    vectors = vectors_of(stream)
    return (0, 0) if vectors is None else (0 if vectors.shape[0] == 1 else vectors.stride(0), vectors.stride(1))


def _numbers(stream: PackedStream) -> Tensor:
    return stream.pages if stream.parameters is None else stream.parameters


def _first(stream: PackedStream) -> Tensor | None:
    return None if stream.counts is None else first_words(stream.counts, stream.pages.device)


def _tables(rope_tables: RopeTables | None) -> tuple[Tensor | None, ...]:
    """What the kernel calls AXES, MEAN, SIZE, COARSE, FINE."""
    if rope_tables is None:
        return (None,) * 5
    return rope_tables.axes, rope_tables.mean, rope_tables.size, rope_tables.coarse, rope_tables.fine


def _map_strides(maps: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Of rows, heads and channels, of the first two together and of the others."""
    step, zero, scale, shift = maps
    return *_channel_strides(step, zero), *_channel_strides(scale, shift)


def _channel_strides(one: Tensor | None, other: Tensor | None) -> tuple[int, ...]:
    """What is the same for all rows, heads or channels has a stride of 0."""
    found = {
        tuple(0 if part.ndim < axis or part.shape[-axis] == 1 else part.stride(-axis) for axis in (4, 3, 1))
        for part in (one, other)
        if part is not None
    }
    assert len(found) <= 1, "scales and zero points that lie differently"
    return found.pop() if found else (0, 0, 0)


def _strides(part: Tensor | None) -> tuple[int, int]:
    """Of pages or rows and of heads; what all heads share has none of the latter."""
    if part is None:
        return 0, 0
    return part.stride(0), 0 if part.shape[1] == 1 else part.stride(1)


def fills(device: torch.device) -> int:
    """Programs of several warps that fill the device."""
    return _programs(device) // 2


@lru_cache
def _programs(device: torch.device) -> int:
    """Programs that fill the device; the interpreter runs them one by one, and a few show that they are joined."""
    if device.type != "cuda":
        return 8
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
