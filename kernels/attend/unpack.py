"""Codes as exact float16 numbers without a conversion: a field's bits become bits of a float16.

Below 2^-13 float16 numbers are evenly spaced: with less than 2^11 as its bits, a number is that many times 2^-24, the least
one. So a word masked for a field that lies at bit b is **code * 2^(b - 24)**, exactly: one instruction (`lop3`) for two codes,
and for fields above bit 10 a shift for several. Matrix instructions take such numbers as any others, and whoever multiplies by
them has the power of two in the other factor or in the result.

Where codes meet numbers of float16 one by one, which have no range for such powers, or where sums are to have all bits of
float32, an exponent is set beside the field (BIASED). It says 2^(10-b), so that bit b counts as 1, and the number is **code +
2^(10-b)**, exactly. The bias is taken away again, at an instruction for two codes (`codes_of`), or by whoever multiplies. What
float32 sums round is a share of it, so that it is at most 64 (b is 4 or higher) beside codes of up to 4 bits, and 16 times as
large as the codes of a wider field.

| fields | shifts of a word | biased: shifts | bias |
|---|---|---|---|
| 16 of 1 bit | as it is, >> 11 | << 6, as it is, >> 6 | 2 ... 64 |
| 8 of 2 | as it is, >> 10 | << 6, as it is, >> 6 | 4 ... 64 |
| 5 of 3 | as it is, >> 9 | << 4, as it is, >> 5 | 8 ... 64 |
| 4 of 4 | as it is, >> 8 | << 6, as it is, >> 2, >> 6 | 16, 64 |
| 2 of 8 | as it is, >> 8 | as it is, >> 6 | 256, 1024 |
| 6, 4, 3, 2, 1 | as it is, >> 10 | as it is, >> 6 | 2 ... 1024 |
| 7, 5, 4 | as it is, >> 7 | as it is, >> 6 | 16 ... 1024 |

The number of a trellis-coded level has one bit more than its field. `trellis_levels.py` puts this bit below where the field
begins, in one word for the even planes and in another for the odd ones; only the first plane's takes an instruction more. `widths`
of such words end with a 0.
"""

import triton
import triton.language as tl

# The least number of float16 is 2 to the minus so much.
LEAST_EXPONENT = 24


@triton.constexpr_function
def plane_count(widths):
    """Codes in a word."""
    return len(widths) - is_trellis(widths)


@triton.constexpr_function
def is_trellis(widths):
    """Whether words are of trellis-coded levels: widths end with a 0."""
    return widths[-1] == 0


@triton.constexpr_function
def are_codes(widths):
    """Whether words hold codes; tokens as the model made them are one plane, of 16 bits."""
    return widths[0] < 16


@triton.constexpr_function
def level_bits(widths, plane):
    """Bits of a plane's numbers."""
    return widths[plane] + is_trellis(widths)


@triton.constexpr_function
def begin_of(widths, plane):
    """The lowest bit of a plane's field in its word; of a level's number, which is one below."""
    return sum(widths[:plane]) - is_trellis(widths)


@triton.constexpr_function
def field(widths, plane, biased):
    """(shift of a word to the left, negative for the right; the lowest bit of the plane's number then).

    The shifts are as few as can be. A field may be shifted by any amount of a stretch: of those that no shift serves yet, the
    stretch that ends first needs one, which serves all that it can. As it is, a word costs nothing and serves first. Of the
    shifts that will do, biased fields take the farthest to the left, which leaves the smallest bias, others the farthest to the
    right, so that the powers of two of planes differ least.
    """
    planes = range(plane_count(widths))
    begins, bits = [begin_of(widths, number) for number in planes], [level_bits(widths, number) for number in planes]
    lowest = [(4 if size <= 4 else max(0, 6 - size)) if biased else 0 for size in bits]
    highest = 10 if biased else 11
    least = [low - begin for low, begin in zip(lowest, begins, strict=True)]
    most = [highest - size - begin for size, begin in zip(bits, begins, strict=True)]
    shifts, left = [0], [ends for ends in sorted(zip(most, least, strict=True)) if not ends[1] <= 0 <= ends[0]]
    while left:
        served = [first for _, first in left if first <= left[0][0]]
        shifts.append(left[0][0] if biased else max(served))
        left = [ends for ends in left if not ends[1] <= shifts[-1] <= ends[0]]
    will_do = [shift for shift in shifts if least[plane] <= shift <= most[plane]]
    own = max(will_do) if biased else min(will_do, key=abs)
    return own, begins[plane] + own


@triton.constexpr_function
def first_parity(widths):
    """Which word has the lowest bit of the first plane's level, at bit 15: 0 that of the even planes, 1 that of the odd ones. It is
    the one without the last plane."""
    return plane_count(widths) % 2


@triton.constexpr_function
def shifted(word, shifts):
    """Plane by plane, the farthest to the left first: PTX that shifts a `word` so, "" where it lies so, and where it lies then."""
    found, held = [], 0
    for minus_shift, plane in sorted((-shift, plane) for plane, shift in enumerate(shifts)):
        shift, line = -minus_shift, ""
        if shift and shift != held:
            line, held = f"{'shl' if shift > 0 else 'shr'}.b32 t, {word}, {abs(shift)};", shift
        found.append((plane, line, "t" if shift else word))
    return found


@triton.constexpr_function
def assembly(widths, biased):
    """PTX for two words at once: $0 ... of the planes, two float16 numbers each, from the words in the operand behind them; of
    levels from those of the even planes there, and from those of the odd ones in the operand behind that."""
    count, kinds, lines = plane_count(widths), 1 + is_trellis(widths), ["{", ".reg .b32 t;"]
    for kind in range(kinds):
        own = range(kind, count, kinds)
        for number, move, source in shifted(f"${count + kind}", [shift_of(widths, plane, biased) for plane in own]):
            plane = own[number]
            mask, exponent = mask_of(widths, plane, biased), exponent_of(widths, plane, biased)
            lines += [
                move,
                f"lop3.b32 ${plane}, {source}, 0x{mask:04x}{mask:04x}, 0x{exponent:04x}{exponent:04x}, 0xEA;",
            ]
    if is_trellis(widths):
        bit = field(widths, 0, biased)[1]
        _, move, source = shifted(f"${count + first_parity(widths)}", [bit - 15])[0]
        lines += [move, f"lop3.b32 $0, {source}, 0x{1 << bit:04x}{1 << bit:04x}, $0, 0xEA;"]
    return "\n".join(line for line in [*lines, "}"] if line)


@triton.constexpr_function
def constraints(widths):
    """Operands of `assembly`. The first planes are written before the words are read for the last time, hence the `&`."""
    return "=&r," * plane_count(widths) + ("r,r" if is_trellis(widths) else "r")


@triton.constexpr_function
def shift_of(widths, plane, biased):
    """How far to the left, negative for the right."""
    return field(widths, plane, biased)[0]


@triton.constexpr_function
def mask_of(widths, plane, biased):
    """The bits of a plane's number after the shift; without the lowest one of the first level, which lies elsewhere."""
    apart = is_trellis(widths) and plane == 0
    return (1 << level_bits(widths, plane) - apart) - 1 << field(widths, plane, biased)[1] + apart


@triton.constexpr_function
def exponent_of(widths, plane, biased):
    """Bits of the float16 number that a code of 0 becomes."""
    return 0x6400 - 0x400 * field(widths, plane, True)[1] if biased else 0


@triton.constexpr_function
def bias_of(widths, plane):
    """What the numbers of a plane are larger than its codes where they are BIASED."""
    return float(1 << 10 - field(widths, plane, True)[1])


@triton.constexpr_function
def unit_of(widths, plane, whole):
    """What the numbers of a plane in `codes_of` are to its codes: a power of two; 1 for WHOLE ones, or tokens that are no codes."""
    return 1.0 if whole or not are_codes(widths) else 2.0 ** (field(widths, plane, False)[1] - LEAST_EXPONENT)


@triton.jit
def _shifted(words, SHIFT: tl.constexpr):
    """To the left, or to the right where SHIFT is negative."""
    # No name for a shift: a name makes a constant of Python one of the device.
    return words << SHIFT if SHIFT > 0 else words >> -SHIFT


@triton.jit
def unpacked(words, odd, WIDTHS: tl.constexpr, BIASED: tl.constexpr, PLAIN: tl.constexpr):
    """The planes of `words` int16, float16 as BIASED says, as a tuple; of trellis-coded levels the even ones, and of `odd` words,
    which others do not have, the odd ones. With `PLAIN` by plain operations, the same bits: the interpreter runs no assembly. The
    text is made while a kernel is compiled; made by its launch it costs as much as many launches.
    """
    if PLAIN:
        found = ()
        for plane in tl.static_range(plane_count(WIDTHS)):
            own = odd if is_trellis(WIDTHS) and plane % 2 else words
            bits = _shifted(own, shift_of(WIDTHS, plane, BIASED)) & mask_of(WIDTHS, plane, BIASED)
            bits |= exponent_of(WIDTHS, plane, BIASED)
            if is_trellis(WIDTHS) and plane == 0:
                first = odd if first_parity(WIDTHS) else words
                bits |= _shifted(first, field(WIDTHS, plane, BIASED)[1] - 15) & (1 << field(WIDTHS, plane, BIASED)[1])
            found += (bits.to(tl.int16).to(tl.float16, bitcast=True),)
        return found
    else:
        return tl.inline_asm_elementwise(
            assembly(WIDTHS, BIASED),
            constraints(WIDTHS),
            [words, odd] if is_trellis(WIDTHS) else [words],
            dtype=(tl.float16,) * plane_count(WIDTHS),
            is_pure=True,
            pack=2,
        )


@triton.jit
def codes_of(words, odd, WIDTHS: tl.constexpr, WHOLE: tl.constexpr, PLAIN: tl.constexpr):
    """The planes of such words, float16: multiples of `unit_of` or, WHOLE, the codes themselves, at an instruction more for two."""
    planes = unpacked(words, odd, WIDTHS, WHOLE, PLAIN)
    if WHOLE:
        found = ()
        for plane in tl.static_range(plane_count(WIDTHS)):
            found += (planes[plane] - bias_of(WIDTHS, plane),)
        return found
    else:
        return planes
