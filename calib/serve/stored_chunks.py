"""Stores chunks in a folder of blobs with one codec: a chunk that cannot be encoded is not stored, a bad blob is a cache miss."""

import torch
from torch import Tensor

from calib.runtime.storage import BlobError, Codec, Header
from calib.serve.blob_folder import BlobFolder
from calib.serve.refusals import Refusals


class StoredChunks:
    """The chunks of one slice of KV heads; threads may share it.

    Args:
        codec: the slice's codec.
        folder: the folder of their blobs.
        refusals: logs why a chunk is not stored or not used.
    """

    def __init__(self, codec: Codec, folder: BlobFolder, refusals: Refusals) -> None:
        self._codec, self._folder, self._refusals = codec, folder, refusals

    def has(self, key: str) -> bool:
        """Whether a chunk of this key is in the folder."""
        return self._folder.has(key)

    def store(self, key: str, chunk: Tensor, start: int) -> bool:
        """Encodes and stores a chunk (as for `Codec.encode`) unless it is stored already; returns whether it is stored now.

        A chunk that the codec refuses, such as one with NaN, is not stored.
        """
        if self._folder.has(key):
            return True
        try:
            blob = self._codec.encode(chunk, start)
        except ValueError as error:
            self._refusals.tell(error)
            return False
        return self._folder.write(key, blob)

    def load(self, key: str, tokens: int, dtype: torch.dtype, start: int | None = None) -> Tensor | None:
        """Returns the chunk `[2, layers, tokens, kv_heads * head_dim]` in host memory, or None for a miss.

        A blob that is damaged, or has another number of tokens, dtype or start (None: any), is a miss too; its file is removed, so
        that it can be stored again.
        """
        blob = self._folder.read(key)
        if blob is None:
            return None
        shape = 2, self._codec.layers, tokens, len(self._codec.heads) * self._codec.head_dim
        try:
            found = Header.read(blob).start
            if start not in (None, found):
                raise BlobError(f"the blob begins at position {found}, expected {start}; compute these tokens again")
            return self._codec.decode(blob, out=torch.empty(shape, dtype=dtype))
        except ValueError as error:
            self._refusals.tell(error)
            self._folder.remove(key)
            return None
