"""How attention's kernels read what a codec left in pages."""

from dataclasses import replace

from calib.kernels.attend.operation import PackedStream
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.dispatch import prefers_triton
from calib.kernels.outliers.operation import PageTerms, supported
from calib.runtime.paging.field import Block
from calib.runtime.paging.page_numbers import Pages
from calib.runtime.paging.pool import PagePool, device_memory
from calib.runtime.stages.codec.corrected import Corrected
from calib.runtime.stages.contract import Codec, Transform

NOTHING: Block = {}


def packed_stream(
    codec: Codec, pool: PagePool, channels: int, part: str = "", shared: Block = NOTHING
) -> PackedStream | None:
    """The fields of `part` ("keys.") as one stream; None for codecs, and for pages elsewhere, that are read tile by tile alone.

    `shared` is what a row's tokens have in common, as a tile of one.
    """
    return codec.packed(_of(pool, part), channels, shared) if pool.memory is device_memory else None


def mapped(stream: PackedStream | None, transform: Transform) -> PackedStream | None:
    """The stream with the map of its tokens' channels, where there is one and a kernel takes it: nobody else need fold it."""
    if stream is None or stream.sizes is not None:
        return stream
    return replace(stream, map=transform.channel_map()) if prefers_triton(stream.pages.device) else stream


def page_terms(
    codec: Corrected, pool: PagePool, channels: int, part: str, row_params: PagePool | None, pages: Pages | None
) -> PageTerms | None:
    """What corrects a codec in `part`, rows' outliers in these `pages` of `row_params`; None where no kernel takes it."""
    if pool.memory is not device_memory:
        return None
    lists, records = NOTHING, None
    if row_params is not None and pages is not None:
        lists = _of(row_params, part)
        if isinstance(pages, slice):
            lists = {name: tensor[pages] for name, tensor in lists.items()}
        else:
            records = pages.flatten()
    terms = codec.terms(_of(pool, part), lists, records)
    return terms if terms is not None and supported(terms, channels, pool.device) else None


def sparse_pages(codec: Codec, pool: PagePool, part: str) -> SparsePages | None:
    """The pairs of `part` and what their indices are of; None for other codecs."""
    return codec.sparse_pages(_of(pool, part)) if pool.memory is device_memory else None


def _of(pool: PagePool, part: str) -> Block:
    """The fields of `part` by the codec's own names."""
    if not part:
        return pool.tensors
    return {name.removeprefix(part): tensor for name, tensor in pool.tensors.items() if name.startswith(part)}
