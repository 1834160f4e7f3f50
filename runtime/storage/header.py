"""The header of a stored chunk, its first 128 bytes, and the checks of a blob before any of it is used.

Little endian, without gaps:

    bytes    type      field
    0-7      8 bytes   magic, "calibkv" and a zero byte
    8-9      uint16    format version, 1
    10-11    uint16    bytes of this header, 128
    12       uint8     dtype of the chunk: 1 float32, 2 float16, 3 bfloat16
    13       uint8     forms: 1 tokens have sizes, 2 values are predicted from keys, 4 room for exact tokens in every blob,
                       8 (beside 1 and 2) all heads of a layer have one basis, 16 (beside 1, 2 and 8, without 4) codes went through
                       an entropy coder, 32 (without 8) levels are trellis-coded; added up
    14-15    uint16    first positions of a text, whose tokens are exact
    16-19    uint32    layers of the model
    20-23    uint32    KV heads of the model
    24-27    uint32    first KV head of this chunk (tensor parallelism)
    28-31    uint32    KV heads of this chunk
    32-35    uint32    head_dim
    36-39    uint32    tokens
    40-47    uint64    position of the first token
    48-55    float64   the budget in bits per value
    56-63    uint64    bytes after this header
    64-79    16 bytes  hash of the artifact's tensors on which codes depend, and of its model (`hashes.py`)
    80-95    16 bytes  hash of the number of bits of every component
    96-111   16 bytes  0
    112-127  16 bytes  BLAKE2b of bytes 0-111 and of all bytes after the header

The checksum is against accidents and is no authentication: anyone who can write a blob can write its checksum. So every field is
also compared with what the reader expects, and the number of bytes with that for the tokens, before memory is allocated.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import MOST

MAGIC = b"calibkv\0"
VERSION = 1
FIELDS = struct.Struct("<8sHHBBHIIIIIIQdQ16s16s16s")
CHECKSUM_BYTES = 16
HEADER_BYTES = FIELDS.size + CHECKSUM_BYTES
DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
SIZE, PREDICT, FIXED, JOINT, ENTROPY, TRELLIS = 1, 2, 4, 8, 16, 32  # forms
BY_HEAD = (0, SIZE, SIZE + PREDICT)
WITH_ROOM = (*BY_HEAD, *(form + TRELLIS for form in BY_HEAD), SIZE + PREDICT + JOINT)
FORMS = (*WITH_ROOM, *(form + FIXED for form in WITH_ROOM), SIZE + PREDICT + JOINT + ENTROPY)
NOTHING = bytes(16)
AGAIN = "compute these tokens again"

Bytes: TypeAlias = bytes | bytearray | memoryview


class BlobError(ValueError):
    """A blob that a codec cannot use: of another model, artifact, slice of heads or version, truncated or damaged. One line."""


@dataclass(frozen=True)
class Header:
    """The fields of a blob's header.

    Attributes:
        dtype: dtype of the chunk: float32, float16 or bfloat16.
        size, predict: whether tokens have sizes, and values are predicted from keys (options of `klt`).
        joint: whether all heads of a layer have one basis (`joint_layer.py`).
        entropy: whether codes went through an entropy coder (`entropy.py`), if that saves bytes.
        trellis: whether levels are trellis-coded (option of `klt`).
        sinks: number of first positions of a text whose tokens are exact.
        fixed_size: whether a blob that begins after them has room for as many exact tokens, too.
        layers, kv_heads, head_dim: the model's shape.
        heads: the KV heads of this chunk.
        tokens: number of tokens.
        start: the position of the first token.
        bits: the budget in bits per value.
        payload_bytes: number of bytes after the header.
        artifact, layout: hashes of the tensors, and of the bits of every component, 16 bytes each.
    """

    dtype: torch.dtype
    size: bool
    predict: bool
    sinks: int
    fixed_size: bool
    layers: int
    kv_heads: int
    heads: range
    head_dim: int
    tokens: int
    start: int
    bits: float
    payload_bytes: int
    artifact: bytes
    layout: bytes
    joint: bool = False
    entropy: bool = False
    trellis: bool = False

    @property
    def exact(self) -> int:
        """Number of exact tokens for which there is room, before the codes."""
        return exact_tokens(self.tokens, self.start, self.sinks, self.fixed_size)

    def packed(self, payload: memoryview) -> bytes:
        """The header's 128 bytes for this payload, the checksum included."""
        dtype = next(code for code, known in DTYPES.items() if known == self.dtype)
        forms = SIZE * self.size + PREDICT * self.predict + FIXED * self.fixed_size
        forms += JOINT * self.joint + ENTROPY * self.entropy + TRELLIS * self.trellis
        heads = (self.kv_heads, self.heads.start, len(self.heads), self.head_dim)
        numbers = (self.tokens, self.start, self.bits, self.payload_bytes)
        head = (MAGIC, VERSION, HEADER_BYTES, dtype, forms, self.sinks, self.layers, *heads)
        fields = FIELDS.pack(*head, *numbers, self.artifact, self.layout, NOTHING)
        return fields + checksum(fields, payload)

    @classmethod
    def read(cls, blob: "Bytes | Tensor") -> "Header":
        """Reads the header of a blob, which may be truncated after it; only the header's own format is checked. Raises
        BlobError."""
        start = bytes(view_of(blob)[:HEADER_BYTES])
        if len(start) < HEADER_BYTES:
            raise BlobError(f"the blob has {len(start)} bytes, expected at least {HEADER_BYTES} of its header; {AGAIN}")
        magic, version, length, dtype, forms, sinks, *numbers, artifact, layout, rest = FIELDS.unpack_from(start)
        if magic != MAGIC:
            raise BlobError(f"the blob begins with {printable(magic)}, expected {printable(MAGIC)}; {AGAIN}")
        if version != VERSION:
            raise BlobError(f"the blob has format version {version}, expected {VERSION}; {AGAIN}")
        if length != HEADER_BYTES or rest != NOTHING or forms not in FORMS:
            raise BlobError(f"the blob's header is not one of format version {VERSION}; {AGAIN}")
        if dtype not in DTYPES:
            raise BlobError(f"the blob's dtype is number {dtype}, expected one of {sorted(DTYPES)}; {AGAIN}")
        layers, kv_heads, first, heads, head_dim, tokens, position, bits, payload = numbers
        return cls(
            DTYPES[dtype],
            bool(forms & SIZE),
            bool(forms & PREDICT),
            sinks,
            bool(forms & FIXED),
            layers,
            kv_heads,
            range(first, first + heads),
            head_dim,
            tokens,
            position,
            bits,
            payload,
            artifact,
            layout,
            bool(forms & JOINT),
            bool(forms & ENTROPY),
            bool(forms & TRELLIS),
        )


def view_of(blob: "Bytes | Tensor") -> memoryview:
    """The bytes of a blob, copied only if they are on another device; raises BlobError for an object without a buffer of bytes."""
    if isinstance(blob, Tensor):
        if blob.dtype != torch.uint8 or blob.dim() != 1:
            raise BlobError(
                f"the blob is {blob.dtype} with {blob.dim()} axes, expected a uint8 tensor with one; {AGAIN}"
            )
        return blob.detach().cpu().contiguous().numpy().data.cast("B")
    try:
        return memoryview(blob).cast("B")
    except TypeError as error:  # no buffer, or one with gaps
        raise BlobError(f"the blob is a {type(blob).__name__}, expected bytes or a uint8 tensor; {AGAIN}") from error


def exact_tokens(tokens: int, start: int, sinks: int, fixed_size: bool) -> int:
    """How many of `tokens` tokens from position `start` on are before position `sinks`; with `fixed_size` from position 0 on."""
    return min(tokens, sinks) if fixed_size else max(0, min(tokens, sinks - start))


def checked(
    blob: "Bytes | Tensor", expected: Header, payload_bytes: Callable[[Header], range]
) -> tuple[Header, Tensor]:
    """Checks a whole blob: its header must agree with `expected` in all but dtype, tokens and start, the number of bytes after it
    must be in `payload_bytes(header)`, and the checksum must be right. Return the header and a copy of the payload, uint8.

    It is a copy, so that checked bytes do not change if a store overwrites its memory meanwhile. Raises BlobError.
    """
    view = view_of(blob)
    start = bytes(view[:HEADER_BYTES])
    found = Header.read(start)
    for name in (
        "layers",
        "kv_heads",
        "head_dim",
        "heads",
        "bits",
        "size",
        "predict",
        "joint",
        "entropy",
        "trellis",
        "sinks",
        "fixed_size",
        "artifact",
        "layout",
    ):
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            ours, theirs = ((one.hex() if isinstance(one, bytes) else printable(one)) for one in (ours, theirs))
            raise BlobError(f"{name} of the blob is {theirs}, expected {ours}; {AGAIN}")
    if not 1 <= found.tokens <= MOST or found.start > MOST - found.tokens:
        raise BlobError(
            f"the blob has {found.tokens} tokens from position {found.start}, expected positions below {MOST}; {AGAIN}"
        )
    sizes = payload_bytes(found)
    if found.payload_bytes not in sizes or len(view) != HEADER_BYTES + found.payload_bytes:
        least, most = (HEADER_BYTES + end for end in (sizes.start, sizes.stop - 1))
        expected_bytes = str(most) if least == most else f"{least} to {most}"
        raise BlobError(f"the blob has {len(view)} bytes, expected {expected_bytes} for {found.tokens} tokens; {AGAIN}")
    payload = bytearray(view[HEADER_BYTES:])
    if checksum(start[: FIELDS.size], memoryview(payload)) != start[FIELDS.size :]:
        raise BlobError(f"the blob was changed after it was written: its checksum differs; {AGAIN}")
    return found, torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.zeros(0, dtype=torch.uint8)


def checksum(fields: bytes, payload: memoryview) -> bytes:
    """BLAKE2b of the header's fields and the payload, 16 bytes."""
    found = hashlib.blake2b(fields, digest_size=CHECKSUM_BYTES)
    found.update(payload)
    return found.digest()
