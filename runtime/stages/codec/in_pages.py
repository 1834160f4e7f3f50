"""A codec's fields in pages, in the form that attention's kernels read."""

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
    """The fields of `part` ("keys.") in the pages of `pool` as one stream; None where they can only be read tile by tile: the codec
    has no packed form, or the pages are not in device memory.

    `shared` has the parameters that all tokens of a row share, in a tile's layout.
    """
    return codec.packed(_of(pool, part), channels, shared) if pool.memory is device_memory else None


def mapped(stream: PackedStream | None, transform: Transform) -> PackedStream | None:
    """The stream with the transform's channel map, which the kernel then folds, if Triton kernels run on its device.

    A stream of sized tokens stays as it is.
    """
    if stream is None or stream.sizes is not None:
        return stream
    return replace(stream, map=transform.channel_map()) if prefers_triton(stream.pages.device) else stream


def page_terms(
    codec: Corrected, pool: PagePool, channels: int, part: str, row_params: PagePool | None, pages: Pages | None
) -> PageTerms | None:
    """The corrections of `codec` in `part`, rows' outliers from the `pages` of `row_params`; None if no kernel supports them."""
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
    """The sparse pairs of `part` with their atoms; None for other codecs, or if pages are not in device memory."""
    return codec.sparse_pages(_of(pool, part)) if pool.memory is device_memory else None


def _of(pool: PagePool, part: str) -> Block:
    """The pool's fields of `part`, without that prefix in their names."""
    if not part:
        return pool.tensors
    return {name.removeprefix(part): tensor for name, tensor in pool.tensors.items() if name.startswith(part)}
