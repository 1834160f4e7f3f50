"""Codes as exact float16 numbers without a conversion: a field's bits become bits of a float16.

Below 2^-13 float16 numbers are evenly spaced: with less than 2^11 as its bits, a number is that many times 2^-24, the least
one. So a word masked for a field that lies at bit b is **code * 2^(b - 24)**, exactly: one instruction (`lop3`) for two codes,
and for fields above bit 10 a shift for several. Matrix instructions accept such subnormal numbers, and the power of two is
absorbed by the other factor or by the result.

Where codes are multiplied elementwise by float16 numbers, whose range such powers would exceed, or where sums need all bits of
float32, an exponent is set beside the field (BIASED). With exponent 2^(10-b) bit b counts as 1, and the number is **code +
2^(10-b)**, exactly. The bias is subtracted by one instruction for two codes (`codes_of`), or by the code that uses the products.
Rounding errors of float32 sums grow with the bias, so it is kept small: at most 64 (b is 4 or higher) for codes of up to 4 bits,
and 2^(bits + 4) for wider ones.

| fields | shifts of a word | biased: shifts | bias |
|---|---|---|---|
| 16 of 1 bit | as it is, >> 11 | << 6, as it is, >> 6 | 2 ... 64 |
| 8 of 2 | as it is, >> 10 | << 6, as it is, >> 6 | 4 ... 64 |
| 5 of 3 | as it is, >> 9 | << 4, as it is, >> 5 | 8 ... 64 |
| 4 of 4 | as it is, >> 8 | << 6, as it is, >> 2, >> 6 | 16, 64 |
| 2 of 8 | as it is, >> 8 | as it is, >> 6 | 256, 1024 |
| 6, 4, 3, 2, 1 | as it is, >> 10 | as it is, >> 6 | 2 ... 1024 |
| 7, 5, 4 | as it is, >> 7 | as it is, >> 6 | 16 ... 1024 |

The number of a trellis-coded level has one bit more than its field. `trellis_levels.py` stores this bit directly below the field,
in one word for the even planes and in another for the odd ones; only the first plane takes an instruction more. The `widths` of
such words end with a 0.
"""

import triton
import triton.language as tl

# The least positive number of float16 is 2^-24.
LEAST_EXPONENT = 24


@triton.constexpr_function
def plane_count(widths):
    """Number of codes in a word."""
    return len(widths) - is_trellis(widths)


@triton.constexpr_function
def is_trellis(widths):
    """Whether words hold trellis-coded levels: their widths end with a 0."""
    return widths[-1] == 0


@triton.constexpr_function
def are_codes(widths):
    """Whether words hold codes; exact tokens are described as one plane of 16 bits."""
    return widths[0] < 16


@triton.constexpr_function
def level_bits(widths, plane):
    """Bits of a plane's numbers: of its codes, or of its trellis-coded levels."""
    return widths[plane] + is_trellis(widths)


@triton.constexpr_function
def begin_of(widths, plane):
    """The lowest bit of a plane's field in its word; for trellis-coded levels that of the level's number, one bit below."""
    return sum(widths[:plane]) - is_trellis(widths)


@triton.constexpr_function
def field(widths, plane, biased):
    """Returns (left shift of the word, negative for a right shift; lowest bit of the plane's number after the shift).

    The number of different shifts is minimised. Each field allows an interval of shifts. The unshifted word is used first because
    it is free, then follows a greedy cover: the remaining interval that ends first gets a shift, which serves all intervals that
    contain it. Of the shifts found that a field allows, a biased field takes the one farthest to the left, which gives the smallest
    bias, any other field the one nearest to 0.
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
    """Which word holds the lowest bit of the first plane's level, at bit 15: that of the even planes (0) or that of the odd ones
    (1). It is the word that does not need the last plane."""
    return plane_count(widths) % 2


@triton.constexpr_function
def shifted(word, shifts):
    """Lists (plane, PTX line that shifts `word` for it, register with the result), the farthest left shift first. The line is ""
    where no new shift is needed."""
    found, held = [], 0
    for minus_shift, plane in sorted((-shift, plane) for plane, shift in enumerate(shifts)):
        shift, line = -minus_shift, ""
        if shift and shift != held:
            line, held = f"{'shl' if shift > 0 else 'shr'}.b32 t, {word}, {abs(shift)};", shift
        found.append((plane, line, "t" if shift else word))
    return found


@triton.constexpr_function
def assembly(widths, biased):
    """PTX that unpacks two words at once. Operands: $0 ... are the planes, two float16 numbers each, then the words; for
    trellis-coded levels the words of the even planes, then those of the odd planes."""
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
    """Operand constraints of `assembly`. `&` (early clobber): planes are written before the words are read for the last time."""
    return "=&r," * plane_count(widths) + ("r,r" if is_trellis(widths) else "r")


@triton.constexpr_function
def shift_of(widths, plane, biased):
    """Left shift of a plane's word, negative for a right shift."""
    return field(widths, plane, biased)[0]


@triton.constexpr_function
def mask_of(widths, plane, biased):
    """Mask of a plane's number after the shift; for the first trellis-coded level without its lowest bit, which lies elsewhere."""
    apart = is_trellis(widths) and plane == 0
    return (1 << level_bits(widths, plane) - apart) - 1 << field(widths, plane, biased)[1] + apart


@triton.constexpr_function
def exponent_of(widths, plane, biased):
    """Bits of the float16 number that code 0 is unpacked to: the exponent if BIASED, else 0."""
    return 0x6400 - 0x400 * field(widths, plane, True)[1] if biased else 0


@triton.constexpr_function
def bias_of(widths, plane):
    """Difference between a plane's BIASED numbers and its codes."""
    return float(1 << 10 - field(widths, plane, True)[1])


@triton.constexpr_function
def unit_of(widths, plane, whole):
    """Ratio of a plane's numbers in `codes_of` to its codes: a power of two; 1 for WHOLE codes and for exact tokens."""
    return 1.0 if whole or not are_codes(widths) else 2.0 ** (field(widths, plane, False)[1] - LEAST_EXPONENT)


@triton.jit
def _shifted(words, SHIFT: tl.constexpr):
    """Shift to the left, or to the right if SHIFT is negative."""
    # SHIFT is used directly: assigned to a name, Triton would turn the Python constant into a device value.
    return words << SHIFT if SHIFT > 0 else words >> -SHIFT


@triton.jit
def unpacked(words, odd, WIDTHS: tl.constexpr, BIASED: tl.constexpr, PLAIN: tl.constexpr):
    """Unpacks int16 `words` to a tuple of float16 planes, BIASED or not. For trellis-coded levels the even planes come from `words`
    and the odd ones from `odd`, which other words do not use. PLAIN: use plain operations, with the same bits, for the interpreter,
    which cannot run assembly. The assembly text is built at compile time: built at each launch it would cost as much as many
    launches.
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
    """Unpacks words to float16 planes: codes times `unit_of` or, if WHOLE, the codes themselves (one more instruction for two)."""
    planes = unpacked(words, odd, WIDTHS, WHOLE, PLAIN)
    if WHOLE:
        found = ()
        for plane in tl.static_range(plane_count(WIDTHS)):
            found += (planes[plane] - bias_of(WIDTHS, plane),)
        return found
    else:
        return planes
