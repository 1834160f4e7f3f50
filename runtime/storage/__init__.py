"""Keys and values of a chunk of tokens as bytes of a known size: for files, other machines and prefix stores of serving engines.

    codec = Codec.from_artifact("my.calib.safetensors", bits=2)
    blob = codec.encode(chunk, start)     # chunk [2, layers, tokens, kv_heads * head_dim], its first token at position start
    chunk = codec.decode(blob)            # raises BlobError for a damaged blob, or one of another codec

`header.py` and `codec.py` specify the bytes.
"""

from calib.runtime.storage.codec import Codec
from calib.runtime.storage.header import BlobError, Header

__all__ = ["BlobError", "Codec", "Header"]
