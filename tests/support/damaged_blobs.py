"""Damaged blobs of stored chunks: offsets of the header's numbers, correct checksums for changed blobs, a seeded generator."""

import hashlib
import math
import struct
from collections.abc import Callable
from random import Random

from stored_chunks import HEADER, exact_bytes

# Format and offset of each number of the header, from its documentation.
NUMBERS = {
    "version": ("<H", 8), "header": ("<H", 10), "dtype": ("<B", 12), "forms": ("<B", 13), "sinks": ("<H", 14),
    "layers": ("<I", 16), "kv_heads": ("<I", 20), "first": ("<I", 24), "heads": ("<I", 28), "head_dim": ("<I", 32),
    "tokens": ("<I", 36), "start": ("<Q", 40), "bits": ("<d", 48), "payload": ("<Q", 56),
}  # fmt: skip
VALUES: dict[str, list[float]] = {
    "<B": [0, 1, 2, 3, 4, 7, 8, 11, 27, 31, 32, 35, 39, 255],
    "<H": [0, 1, 2, 4, 127, 128, 2**15, 2**16 - 1],
    "<I": [0, 1, 2, 3, 31, 32, 64, 2**16, 2**30, 2**31 - 1, 2**31, 2**32 - 1],
    "<Q": [0, 1, 2, 4, 2**20, 2**30 - 1, 2**30, 2**31, 2**62, 2**63, 2**64 - 1],
    "<d": [0.0, -0.0, -2.5, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 8.0, 9.0, 1e-320, 1e308, math.inf, math.nan],
}
FLOATS = [math.nan, math.inf, -math.inf, 3e38, -3e38, 65504.0, 1e-45, 0.0]


def resealed(data: bytes) -> bytes:
    """The blob with a correct checksum, which anyone can compute."""
    found = hashlib.blake2b(data[:112] + data[HEADER:], digest_size=16).digest()
    return data[:112] + found + data[HEADER:]


# ---- changes of a blob; afterwards the checksum is corrected, or not


def flipped(data: bytearray, other: bytes, draw: Random) -> None:
    """Flip some bits, more often in the header."""
    for _ in range(draw.choice([1, 1, 2, 20])):
        at = draw.randrange(draw.choice([HEADER, len(data)]))
        data[at] ^= 1 << draw.randrange(8)


def number(data: bytearray, other: bytes, draw: Random) -> None:
    """Replace a number of the header by one next to it, or by any other."""
    form, at = NUMBERS[draw.choice(sorted(NUMBERS))]
    value = draw.choice(VALUES[form])
    if form != "<d" and draw.random() < 0.4:
        value = (*struct.unpack_from(form, data, at),)[0] + draw.choice([-1, 1])
        value = int(value) % 2 ** (8 * struct.calcsize(form))
    struct.pack_into(form, data, at, value)


def agreeing(data: bytearray, other: bytes, draw: Random) -> None:
    """Change the number of tokens and, consistently, the payload's length in the header; if it is short, the payload as well."""
    (tokens,), (payload,) = struct.unpack_from("<I", data, 36), struct.unpack_from("<Q", data, 56)
    a_token = max(1, (payload - exact_bytes(bytes(data))) // max(1, tokens))
    count = draw.choice([0, 1, max(0, tokens - 1), tokens + 1, 2 * tokens, 2**20, 2**30 - 1, 2**31]) % 2**32
    struct.pack_into("<I", data, 36, count)
    size = count * a_token + exact_bytes(bytes(data))
    struct.pack_into("<Q", data, 56, size)
    if size < 2**20:
        data[HEADER:] = draw.randbytes(size)


def codes(data: bytearray, other: bytes, draw: Random) -> None:
    """Replace everything after the header by random or constant bytes."""
    size = len(data) - HEADER
    fill = draw.choice([b"\0", b"\xff", b"\x80", None])
    data[HEADER:] = draw.randbytes(size) if fill is None else fill * size


def exact(data: bytearray, other: bytes, draw: Random) -> None:
    """Write unusual floats, in the blob's dtype, into the first tokens, which are stored exactly."""
    room = min(len(data) - HEADER, exact_bytes(bytes(data)))
    form, size = {1: ("<f", 4), 2: ("<e", 2), 3: ("<f", 4)}.get(data[12], ("<f", 4))
    for _ in range(draw.choice([1, 5, 200])):
        if room < size:
            return
        value = draw.choice(FLOATS)
        value = max(-65504.0, min(65504.0, value)) if form == "<e" and math.isfinite(value) else value
        struct.pack_into(form, data, HEADER + draw.randrange(room // size) * size, value)


def crossed(data: bytearray, other: bytes, draw: Random) -> None:
    """Replace the header, everything after it, or a run of bytes by that of another intact blob."""
    kind, at = draw.randrange(3), draw.randrange(min(len(data), len(other)))
    if kind == 0:
        data[:HEADER] = other[:HEADER]
    elif kind == 1:
        data[HEADER:] = other[HEADER:]
    else:
        stop = at + draw.choice([1, 2, 4, 8, 64, 1000])
        data[at:stop] = other[at:stop]


def cut(data: bytearray, other: bytes, draw: Random) -> None:
    """Truncate the blob, append to it, or remove bytes from its middle."""
    at, kind = draw.randrange(len(data)), draw.randrange(3)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        data += draw.choice([b"\0", b"\0\0", bytes(data[:HEADER]), draw.randbytes(1000)])
    else:
        del data[at : at + draw.choice([1, 2, 64])]


CHANGES: list[Callable[[bytearray, bytes, Random], None]] = [
    flipped,
    number,
    number,
    agreeing,
    codes,
    exact,
    crossed,
    cut,
]


def damaged(data: bytes, other: bytes, draw: Random) -> tuple[bytes, str]:
    """Return a damaged copy of an intact blob, perhaps with parts of the `other`, and the names of the changes."""
    found, done = bytearray(data), []
    for change in draw.sample(CHANGES, draw.choice([1, 1, 1, 2, 3])):
        if len(found) < HEADER:
            break
        done.append(change.__name__)
        try:
            change(found, other, draw)
        except (IndexError, KeyError, ValueError, struct.error):
            done[-1] += " (nothing left to change)"  # by what was done before
    if len(found) >= HEADER and draw.random() < 0.75:
        return resealed(bytes(found)), ", ".join([*done, "sealed"])
    return bytes(found), ", ".join(done)
