# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Loads of one pair of every token of a tile inside a Triton kernel: its index, its coefficient, and the address of its atom."""

import triton
import triton.language as tl


@triton.jit
def _part(packed, number, there, AT: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """Loads a part of BITS bits of a token's `number`-th index: plane-split (`pack_bytes`) over RUN bytes from byte AT on."""
    RUN: tl.constexpr = (PAIRS * BITS + 7) // 8
    plane = number // RUN
    byte = tl.load(packed + (AT + number - plane * RUN), mask=there, other=0).to(tl.int32)
    return (byte >> (plane * BITS)) & ((1 << BITS) - 1)


@triton.jit
def index_of(packed, number, there, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Loads a token's `number`-th index: WIDTH bits in parts of 8, 4, 2, 1 bits (`pack_bytes`), or unsigned int16 if WIDTH is 0."""
    if WIDTH == 0:
        return tl.load(packed + number, mask=there, other=0).to(tl.int32) & 0xFFFF
    WHOLE: tl.constexpr = WIDTH // 8
    AT_4: tl.constexpr = WHOLE * PAIRS
    AT_2: tl.constexpr = AT_4 + ((PAIRS * 4 + 7) // 8 if WIDTH & 4 else 0)
    AT_1: tl.constexpr = AT_2 + ((PAIRS * 2 + 7) // 8 if WIDTH & 2 else 0)
    index = tl.zeros_like(there.to(tl.int32))
    if WHOLE > 0:
        index |= _part(packed, number, there, 0, 8, PAIRS)
    if WHOLE > 1:
        index |= _part(packed, number, there, PAIRS, 8, PAIRS) << 8
    if WIDTH & 4:
        index |= _part(packed, number, there, AT_4, 4, PAIRS) << (8 * WHOLE)
    if WIDTH & 2:
        index |= _part(packed, number, there, AT_2, 2, PAIRS) << (8 * WHOLE + (WIDTH & 4))
    if WIDTH & 1:
        index |= _part(packed, number, there, AT_1, 1, PAIRS) << (8 * WHOLE + (WIDTH & 6))
    return index


@triton.jit
def coefficient_of(kept, number, there, FLOAT8: tl.constexpr):
    """Loads a token's `number`-th coefficient as float32; e4m3 is converted by bit operations, because GPUs before capability 8.9
    have no instruction for it."""
    if not FLOAT8:
        return tl.load(kept + number, mask=there, other=0.0).to(tl.float32)
    byte = tl.load(kept + number, mask=there, other=0).to(tl.int32)
    # Move exponent and mantissa to their bits in float16, whose exponent bias is 15, not 7: the result is 2^8 too small.
    size = ((byte & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    size = tl.where((byte & 0x7F) == 0x7F, float("nan"), size)
    return tl.where(byte >= 0x80, -size, size)


@triton.jit
def atom_at(offline, online, index, first, ONLINE: tl.constexpr, OFFLINE: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses of the atoms `index`: those from `first` on are the row's own (`online`)."""
    if not ONLINE:
        return offline + index * WIDTH
    if not OFFLINE:
        return online + index * WIDTH
    atom = tl.where(index < first, offline + index * WIDTH, online + (index - first) * WIDTH)
    # Both tables are aligned to 16 bytes if an atom is a multiple of that; after `where` the compiler has to be told.
    return tl.multiple_of(atom, 16) if WIDTH % 8 == 0 else atom
