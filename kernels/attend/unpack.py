"""Codes as exact float16 numbers without a conversion: a field's bits become the mantissa of a number with a known exponent.

A float16 whose exponent says 2^(10-b) counts its mantissa's bit b as 1. So a word shifted until a field lies at bit b (4 or
higher, for a small bias), masked, with that exponent beside it, is **code + 2^(10-b)**, exactly: one instruction (`lop3`) for
two codes, and a shift for several fields. The bias is left in: whoever multiplies by these numbers takes
bias * (sum of the other factors) away, once for a row or a tile and not for each code.

| bits | shifts of a word | bias |
|---|---|---|
| 1 | << 4, >> 2, >> 8 | 2 ... 64 |
| 2 | << 6, as it is, >> 6 | 4 ... 64 |
| 3 | << 4, as it is, >> 5 | 8 ... 64 |
| 4 | << 4, as it is, >> 4, >> 8 | 64 |
| 8 | << 2, >> 6 | 256 |
"""

import triton
import triton.language as tl

from calib.kernels.pack.reference import planes

WIDTHS = (1, 2, 3, 4, 8)


@triton.constexpr_function
def field(bits, plane):
    """(shift of a word to the left, negative for the right; the lowest bit of the plane's field then): bits 4 ... 9, or 2 ... 9."""
    shifts = {1: (4, -2, -8), 2: (6, 0, -6), 3: (4, 0, -5), 4: (4, 0, -4, -8), 8: (2, -6)}[bits]
    lowest = 2 if bits == 8 else 4
    return next((shift, bits * plane + shift) for shift in shifts if lowest <= bits * plane + shift <= 10 - bits)


def assembly(bits: int) -> str:
    """PTX for two words at once: $0 ... of the planes, two float16 numbers each, from the words in the last operand."""
    count, lines, held = planes(bits), ["{", ".reg .b32 t;"], 0
    for plane in range(count):
        shift, at = field(bits, plane)
        source = "t" if shift else f"${count}"
        if shift and shift != held:
            lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 t, ${count}, {abs(shift)};")
            held = shift
        mask, exponent = (1 << bits) - 1 << at, 0x6400 - 0x400 * at
        lines.append(f"lop3.b32 ${plane}, {source}, 0x{mask:04x}{mask:04x}, 0x{exponent:04x}{exponent:04x}, 0xEA;")
    return "\n".join([*lines, "}"])


def constraints(bits: int) -> str:
    """Operands of `assembly`."""
    return "=r," * planes(bits) + "r"


@triton.constexpr_function
def shift_of(bits, plane):
    """How far to the left, negative for the right."""
    return field(bits, plane)[0]


@triton.constexpr_function
def mask_of(bits, plane):
    """The field's bits after the shift."""
    return (1 << bits) - 1 << field(bits, plane)[1]


@triton.constexpr_function
def exponent_of(bits, plane):
    """Bits of the float16 number that a code of 0 becomes."""
    return 0x6400 - 0x400 * field(bits, plane)[1]


@triton.constexpr_function
def bias_of(bits, plane):
    """What the numbers of a plane are larger than its codes; 0 for tokens that are no codes."""
    return 0.0 if bits == 16 else float(1 << 10 - field(bits, plane)[1])


@triton.constexpr_function
def plane_count(bits):
    """Codes in a word; tokens that are no codes are one plane."""
    return 16 // bits


@triton.jit
def unpacked(words, BITS: tl.constexpr, ASM: tl.constexpr, ARGUMENTS: tl.constexpr):
    """The planes of `words` int16, float16 with their bias, as a tuple. Without `ASM` by plain operations, the same bits."""
    if ASM is None:
        found = ()
        for plane in tl.static_range(plane_count(BITS)):
            # No names for these numbers: a name makes a constant of Python one of the device.
            if shift_of(BITS, plane) > 0:
                moved = words << shift_of(BITS, plane)
            else:
                moved = words >> -shift_of(BITS, plane)
            bits = (moved & mask_of(BITS, plane)) | exponent_of(BITS, plane)
            found += (bits.to(tl.int16).to(tl.float16, bitcast=True),)
        return found
    # The tuple of types is a constant of the program text; there is no other way to say how many planes there are.
    if BITS == 1:
        return tl.inline_asm_elementwise(
            ASM, ARGUMENTS, [words],
            dtype=(
                tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
                tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
            ),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 2:
        return tl.inline_asm_elementwise(
            ASM, ARGUMENTS, [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 3:
        return tl.inline_asm_elementwise(
            ASM, ARGUMENTS, [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 4:
        return tl.inline_asm_elementwise(
            ASM, ARGUMENTS, [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(ASM, ARGUMENTS, [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
