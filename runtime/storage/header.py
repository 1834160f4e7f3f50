"""The first 128 bytes of a stored chunk, and what is asked of a blob before anything of it is used.

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
    48-55    float64   bits per value that were asked for
    56-63    uint64    bytes behind this header
    64-79    16 bytes  hash of the artifact's tensors that codes depend on, and of its model (`Codec`)
    80-95    16 bytes  hash of how many bits every component has
    96-111   16 bytes  0
    112-127  16 bytes  BLAKE2b of bytes 0-111 and of all bytes behind the header

The checksum is against accidents and no authentication: whoever can write a blob can write its checksum. So every field is
compared with what the reader expects as well, and the number of bytes with that of the tokens, before anything is allocated.
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
    """A blob that this codec cannot use: of another model, artifact, slice of heads or version, truncated or damaged. One line."""


@dataclass(frozen=True)
class Header:
    """What a blob says of itself.

    Attributes:
        dtype: of the chunk: float32, float16 or bfloat16.
        size, predict: the forms of its codes, as `klt` has them.
        joint: whether all heads of a layer have one basis (`joint_layer.py`).
        entropy: whether codes went through an entropy coder (`entropy.py`), where that saves bytes.
        trellis: whether levels are trellis-coded, as `klt` has them.
        sinks: first positions of a text, whose tokens are exact.
        fixed_size: whether there is room for as many exact tokens in a blob that begins behind them.
        layers, kv_heads, head_dim: of the model.
        heads: the KV heads of this chunk.
        tokens: how many.
        start: the position of the first.
        bits: per value, as asked for.
        payload_bytes: behind the header.
        artifact, layout: 16 bytes each: hashes of the tensors, and of the bits of every component.
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
        """Exact tokens that there is room for, behind the codes."""
        return exact_tokens(self.tokens, self.start, self.sinks, self.fixed_size)

    def packed(self, payload: memoryview) -> bytes:
        """The header of this payload, its checksum included."""
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
        """Of a blob, which need not be whole; nothing is checked but that it is such a header. Raises BlobError."""
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
    """The bytes of a blob, not copied unless they lie on another device; raises BlobError for what has no plain bytes."""
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
    """Of so many tokens from position `start` on those before position `sinks`; as if they began a text, where sizes are fixed."""
    return min(tokens, sinks) if fixed_size else max(0, min(tokens, sinks - start))


def checked(
    blob: "Bytes | Tensor", expected: Header, payload_bytes: Callable[[Header], range]
) -> tuple[Header, Tensor]:
    """The header and a copy of the payload, uint8, of a whole blob that agrees with `expected` in all but dtype, tokens and start,
    and has one of the numbers of bytes behind its header that `payload_bytes` says of it.

    A copy, so that a store that overwrites its memory meanwhile changes nothing that was checked. Raises BlobError.
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
    """BLAKE2b of both."""
    found = hashlib.blake2b(fields, digest_size=CHECKSUM_BYTES)
    found.update(payload)
    return found.digest()
