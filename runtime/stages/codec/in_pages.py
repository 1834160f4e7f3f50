"""How attention's kernels read what a codec left in pages."""

from calib.kernels.attend.operation import EXACT, PackedStream
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.runtime.pool import PagePool, device_memory
from calib.runtime.stages.codec.exact import Exact
from calib.runtime.stages.codec.mixed import MixedQuant
from calib.runtime.stages.codec.sparse import Sparse
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Block, Codec

NOTHING: Block = {}


def packed_stream(
    codec: Codec, pool: PagePool, channels: int, part: str = "", shared: Block = NOTHING
) -> PackedStream | None:
    """The fields of `part` ("keys.") as one stream; None for codecs, and for places, that are met tile by tile alone.

    `shared` is what a row's tokens have in common, as a tile of one.
    """
    if pool.memory is not device_memory:
        return None
    if isinstance(codec, Exact):
        return PackedStream(EXACT, pool.tensors[f"{part}exact"], channels)
    if not isinstance(codec, UniformQuant | MixedQuant):
        return None
    words = pool.tensors[f"{part}words"]
    if isinstance(codec, MixedQuant):
        fixed = codec.step(words.device), codec.least(words.device)
        return PackedStream(codec.widths, words, channels, fixed=fixed, counts=codec.counts)
    if codec.group is None:
        return PackedStream(codec.bits, words, channels, fixed=codec.fixed(words))
    name = f"{part}parameters"
    if name not in pool.fields:
        scale, zero = shared["parameters"].float().chunk(2, -2)
        return PackedStream(codec.bits, words, channels, fixed=(scale.mT, zero.mT)) if codec.whole(channels) else None
    return PackedStream(codec.bits, words, channels, pool.tensors[name], pool.rows_of(pool.fields[name]))


def sparse_pages(codec: Codec, pool: PagePool, part: str) -> SparsePages | None:
    """The pairs of `part` and what their indices are of; None for other codecs."""
    if not isinstance(codec, Sparse) or pool.memory is not device_memory:
        return None
    form, fields = codec.coefficients.form, pool.tensors
    return SparsePages(
        fields[f"{part}indices"],
        fields[f"{part}coefficients"],
        codec.sparsity,
        codec.chunks,
        None if codec.offline is None else codec.offline.tensor,
        codec.online,
        form if isinstance(form, int) else None,
        fields.get(f"{part}scale"),
    )
