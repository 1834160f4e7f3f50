"""Arguments that all launches of `decode_kernel.py` over the same pages have in common; computed once and cached."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from calib.kernels.attend.options import (
    PROGRAMS,
    block_of,
    columns_of,
    constants_of,
    has_wide_rope,
    is_wide,
    maps_of,
    stages_of,
    turn_of,
    warps_of,
)
from calib.kernels.attend.packed_pages import PackedStream, RopeTables
from calib.kernels.dispatch import LITTLE_MEMORY, capability_of
from calib.kernels.early_launch import begins_early
from calib.kernels.pack.heads import first_words
from calib.kernels.powers import cdiv


@dataclass(frozen=True)
class PageLaunch:
    """Launch sizes, and kernel arguments in the kernel's order; each launch inserts its own arguments between them.

    Attributes:
        blocks: programs that share the query rows of a KV head.
        programs: programs per multiprocessor.
        turn: tokens of one turn (iteration of the kernel's loop).
        turns: turns per page.
        columns: columns of a mixture, as `options.columns_of`.
        pages: for keys, then values: pages, parameters, and first word of each head.
        maps: steps, zero points, scales and shifts of keys, then of values.
        coefficients: low-rank coefficients and vectors of keys, coefficients of values, channel scales of values, sizes of keys and
            of values.
        page_strides: strides of the tensors in `pages`.
        other_strides: strides of `coefficients` and `maps`.
        options: constants, warps and stages.
    """

    blocks: int
    programs: int
    turn: int
    turns: int
    columns: tuple[int, ...]
    pages: tuple[Tensor | None, ...]
    maps: tuple[Tensor | None, ...]
    coefficients: tuple[Tensor | None, ...]
    page_strides: tuple[int, ...]
    other_strides: tuple[int, ...]
    options: dict[str, Any]

    @staticmethod
    def over(
        keys: PackedStream,
        values: PackedStream,
        query_rows: int,
        softcap: float | None,
        rope_tables: RopeTables | None,
        mixes_keys: bool,
    ) -> "PageLaunch":
        """Returns the launch for `query_rows` query rows per KV head, cached in `keys.worked_out`."""
        rope_shape = None if rope_tables is None else (rope_tables.axes.shape[-1], rope_tables.fine.shape[-1])
        key = (PageLaunch, values, query_rows, softcap, rope_shape, mixes_keys)
        found: PageLaunch | None = keys.worked_out.get(key)
        if found is None:
            found = made(keys, values, query_rows, softcap, rope_tables, mixes_keys)
            keys.worked_out[key] = found
        return found


def made(
    keys: PackedStream,
    values: PackedStream,
    query_rows: int,
    softcap: float | None,
    rope_tables: RopeTables | None,
    mixes_keys: bool,
) -> PageLaunch:
    """As `PageLaunch.over`, without the cache."""
    capability = capability_of(keys.pages.device)
    takes_memory = capability in LITTLE_MEMORY and (is_wide(keys, values) or has_wide_rope(rope_tables))
    block = block_of(query_rows, few=values.sizes is not None or takes_memory)
    turn = turn_of(keys, values, block, rope_tables)
    of_keys, of_values = maps_of(keys, rope_tables is None), maps_of(values, values.sizes is None)
    parts = (keys.pages, keys.parameters, values.pages, values.parameters)
    of_page = (coefficients_of(values), values.scales)
    sizes = keys.sizes if values.sizes is None else values.sizes
    return PageLaunch(
        blocks=cdiv(query_rows, block),
        programs=PROGRAMS,
        turn=turn,
        turns=cdiv(keys.pages.shape[2], turn),
        columns=columns_of(keys, values, mixes_keys),
        pages=(keys.pages, _numbers(keys), _first(keys), values.pages, _numbers(values), _first(values)),
        maps=(*of_keys, *of_values),
        coefficients=(coefficients_of(keys), vectors_of(keys), *of_page, keys.sizes, values.sizes),
        page_strides=tuple(stride for part in parts for stride in strides_of(part)),
        other_strides=(
            *strides_of(coefficients_of(keys)),
            *_vector_strides(keys),
            *(stride for part in of_page for stride in strides_of(part)),
            strides_of(sizes)[0],
            *_map_strides(of_keys),
            *_map_strides(of_values),
        ),
        options=constants_of(keys, values, block, turn, softcap, rope_tables, mixes_keys=mixes_keys)
        | {
            "num_warps": warps_of(block, keys, values, rope_tables),
            "num_stages": stages_of(keys, values, rope_tables, block, capability),
            "EARLY": begins_early(keys.pages.device),
        },
    )


def coefficients_of(stream: PackedStream) -> Tensor | None:
    """Low-rank coefficients of a stream, or None."""
    return None if stream.ranked is None else stream.ranked.coefficients


def vectors_of(stream: PackedStream) -> Tensor | None:
    """Low-rank basis vectors of a stream, one contiguous vector after the other, or None."""
    if stream.ranked is None:
        return None
    basis, side_by_side = stream.ranked.basis, (stream.ranked.basis.shape[-1], 1)
    return basis if basis.stride()[2:] == side_by_side else basis.contiguous()


def _vector_strides(stream: PackedStream) -> tuple[int, int]:
    """Row and head strides of the basis vectors; 0 for rows if all share them."""
    vectors = vectors_of(stream)
    return (0, 0) if vectors is None else (0 if vectors.shape[0] == 1 else vectors.stride(0), vectors.stride(1))


def strides_of(part: Tensor | None) -> tuple[int, int]:
    """Strides of the first axis (pages or rows) and of heads; the latter is 0 if all heads share the numbers."""
    if part is None:
        return 0, 0
    return part.stride(0), 0 if part.shape[1] == 1 else part.stride(1)


def _numbers(stream: PackedStream) -> Tensor:
    return stream.pages if stream.parameters is None else stream.parameters


def _first(stream: PackedStream) -> Tensor | None:
    return None if stream.counts is None else first_words(stream.counts, stream.pages.device)


def _map_strides(maps: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Row, head and channel strides: of step and zero point, which share them, then of scale and shift."""
    step, zero, scale, shift = maps
    return *_channel_strides(step, zero), *_channel_strides(scale, shift)


def _channel_strides(one: Tensor | None, other: Tensor | None) -> tuple[int, ...]:
    """Row, head and channel strides of two equally laid out tensors; 0 along axes where all share a number."""
    found = {
        tuple(0 if part.ndim < axis or part.shape[-axis] == 1 else part.stride(-axis) for axis in (4, 3, 1))
        for part in (one, other)
        if part is not None
    }
    assert len(found) <= 1, "scales and zero points that lie differently"
    return found.pop() if found else (0, 0, 0)
