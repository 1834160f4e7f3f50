"""Chunks in a folder of blobs, through one codec: what cannot be coded is not stored, what cannot be decoded is a miss."""

import torch
from torch import Tensor

from calib.runtime.storage import BlobError, Codec, Header
from calib.serve.blob_folder import BlobFolder
from calib.serve.refusals import Refusals


class StoredChunks:
    """The chunks of one slice of KV heads; threads may share it.

    Args:
        codec: of the slice.
        folder: where their blobs are.
        refusals: where it is said why a chunk is not stored, or not used.
    """

    def __init__(self, codec: Codec, folder: BlobFolder, refusals: Refusals) -> None:
        self._codec, self._folder, self._refusals = codec, folder, refusals

    def has(self, key: str) -> bool:
        """Whether a chunk of this key is in the folder."""
        return self._folder.has(key)

    def store(self, key: str, chunk: Tensor, start: int) -> bool:
        """Whether the chunk, as `Codec.encode` takes it, is there now. One with NaN is not stored."""
        if self._folder.has(key):
            return True
        try:
            blob = self._codec.encode(chunk, start)
        except ValueError as error:
            self._refusals.tell(error)
            return False
        return self._folder.write(key, blob)

    def load(self, key: str, tokens: int, dtype: torch.dtype, start: int | None = None) -> Tensor | None:
        """The chunk `[2, layers, tokens, kv_heads * head_dim]` in host memory, or None where it is not there.

        One that is damaged, or has another number of tokens, dtype or start (None: any), is not there either: its file is removed,
        so that it can be stored again.
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
