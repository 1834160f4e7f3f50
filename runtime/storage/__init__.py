"""Keys and values of a chunk of tokens as bytes of a known size: for files, other machines and prefix stores of serving engines.

    codec = Codec.from_artifact("my.calib.safetensors", bits=2)
    blob = codec.encode(chunk, start)     # chunk [2, layers, tokens, kv_heads * head_dim], its first token at position start
    chunk = codec.decode(blob)            # BlobError where the blob is none of this codec's, or damaged

What the bytes are is told in `header.py` and `codec.py`.
"""

from calib.runtime.storage.codec import Codec
from calib.runtime.storage.header import BlobError, Header

__all__ = ["BlobError", "Codec", "Header"]
