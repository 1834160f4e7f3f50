"""LMCache's `Serializer` and `Deserializer` around `Codec`.

Failures raise exceptions, which LMCache catches: then nothing of the batch that it stores together is stored, or the whole batch
that it loads together is a miss, and the engine computes the tokens. One bad blob therefore makes its whole batch a miss.
"""

import torch
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import Deserializer, Serializer
from lmcache.v1.memory_management import MemoryObj
from torch import Tensor

from calib.runtime.storage import Codec
from calib.serve.fitted_model import FittedModel
from calib.serve.lmcache.layout import Layout
from calib.serve.lmcache.options import Options
from calib.serve.refusals import Refusals
from calib.serve.starts import Starts

logger = init_logger(__name__)


class Chunks:
    """Shared state of serializer and deserializer: the options, the codecs, and the log of refusals.

    The constructor raises ArtifactError and ValueError as `Codec.from_artifact` does, so that a server does not start with an
    unusable artifact.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        model = FittedModel(options.artifact, options.bits, fixed_size=True, trellis=options.trellis)
        self.layers, self.head_dim, self.slices = model.layers, model.head_dim, model.slices
        self.positions = model.longest(options.positions)
        self.refusals = Refusals(logger, "serde calib refuses a chunk")

    def layout(self, desc: MemoryLayoutDesc) -> Layout:
        return Layout.of(desc.shapes, desc.dtypes, self.layers, self.head_dim, self.options.cpu_block)

    def of(self, chunk: MemoryObj, key: ObjectKey) -> tuple[Layout, Codec, Tensor]:
        """Returns a chunk's layout, the codec of its KV heads, and its tensor. Raises ValueError for another model or layout."""
        if key.model_name != self.options.model:
            raise ValueError(
                f"the chunk is of model {key.model_name}, expected {self.options.model}; run an LMCache server for each model"
            )
        layout = self.layout(MemoryLayoutDesc(chunk.get_shapes(), chunk.get_dtypes()))
        world = ObjectKey.WorldSizeFromKVRank(key.kv_rank)
        heads = self.slices.of_rank(layout.heads, world, key.kv_rank >> 16 & 0xFF)
        tensor = chunk.get_tensor(0)
        if tensor is None:
            raise ValueError("LMCache has freed the memory of the chunk, expected an object that it still holds")
        return layout, self.slices.codec(heads), tensor


class CalibSerializer(Serializer):
    """Encodes chunks to blobs of fixed size."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks, self._starts = chunks, Starts(chunks.positions)

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Writes the blob of `src` into `dst`, zero-padded to the estimated size, which is returned.

        The start of the chunk is found from its keys. Raises ValueError if it is ambiguous, and for chunks of another model, layout
        or dtype; then nothing of the batch is stored.
        """
        try:
            layout, codec, tensor = self._chunks.of(src, key)
            chunk = layout.read(tensor)
            start = self._starts.of(codec, chunk)
            blob = codec.encode(chunk, start)
        except ValueError as error:
            self._chunks.refusals.tell(error)
            raise
        size = self._chunks.slices.size(layout.heads, layout.tokens, layout.dtype)
        into = _bytes_of(dst)[:size]
        into[: len(blob)] = blob
        into[len(blob) :] = 0
        return size

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Returns the exact size of a blob in bytes, as file stores need it.

        For a layout that is refused it is 1: LMCache cannot handle an exception here, and `serialize` raises one later.
        """
        try:
            layout = self._chunks.layout(layout_desc)
            return self._chunks.slices.size(layout.heads, layout.tokens, layout.dtype)
        except ValueError as error:
            self._chunks.refusals.tell(error)
            return 1


class CalibDeserializer(Deserializer):
    """Decodes blobs to chunks."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decodes the blob `src` and writes its chunk into `dst`.

        Raises ValueError (or its subclass BlobError) if the blob is damaged, of another artifact, budget, rank or dtype, or has
        another number of tokens; then nothing has been written to `dst`, and LMCache treats it as a miss.
        """
        try:
            layout, codec, tensor = self._chunks.of(dst, key)
            blob = _bytes_of(src)[: codec.size(layout.tokens, dtype=layout.dtype)]
            if layout.block is None:
                codec.decode(blob, out=tensor)
            else:
                layout.write(tensor, codec.decode(blob, out=torch.empty(layout.chunk_shape, dtype=layout.dtype)))
        except ValueError as error:
            self._chunks.refusals.tell(error)
            raise


def _bytes_of(memory: MemoryObj) -> Tensor:
    """Returns the memory as a view, uint8 `[bytes]`."""
    tensor = memory.tensor
    if tensor is None:
        raise ValueError("LMCache has freed the memory of the blob, expected an object that it still holds")
    return tensor.view(torch.uint8).flatten()
