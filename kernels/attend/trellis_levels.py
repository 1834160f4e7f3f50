"""Converts words of trellis-coded levels (`kernels/trellis`) inside a Triton kernel so that `unpack.py` can unpack them.

A field of b bits stores a bit u and b - 1 others, f. Its level is 4 f + 2 z1 + z0, where n counts the fields of a token:

    z1[n] = u[n] ^ u[n-1] ^ u[n-3]        z0[n] = u[n-2]

So the number of a level is the field with u replaced by z1, and z0 one bit below it, which overwrites the last bit of the field
before. Hence a word is converted to two, both with z1: one for the even planes, whose z0 overwrite bits of the odd planes, and one
for the odd planes. The first plane's z0 has no field below it and is stored at bit 15 of the word that does not need the last
plane. The u of earlier fields may lie in one of the words before: a token's words form one path. All shifts follow from the widths;
fields at the same distance from the bit that they need share a shift.
"""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import begin_of, first_parity, plane_count


@triton.constexpr_function
def below(widths, parity):
    """Mask of the z0 bits in the word of the even planes (`parity` 0) or of the odd ones (1)."""
    bits = sum(1 << begin_of(widths, plane) for plane in range(parity or 2, plane_count(widths), 2))
    return bits | (1 << 15 if parity == first_parity(widths) else 0)


@triton.constexpr_function
def moves(widths, back):
    """Lists (word: 0 for the word itself, 1 for the one before, ...; its left shift; mask of the moved bits) of the moves that
    bring the u of the field `back` fields earlier to each field."""
    count, found = plane_count(widths), {}
    for plane in range(count):
        word, other = 0, plane - back
        while other < 0:
            word, other = word + 1, other + count
        begin = begin_of(widths, plane) + 1
        # z0 goes one bit lower than z1, and that of the first field to bit 15.
        target = begin if back != 2 else (begin - 1) % 16
        shift = target - begin_of(widths, other) - 1
        found[word, shift] = found.get((word, shift), 0) | 1 << target
    return [(word, shift, bits) for (word, shift), bits in sorted(found.items())]


@triton.constexpr_function
def words_before(widths):
    """How many earlier words the levels of a word depend on."""
    return max(word for back in (1, 2, 3) for word, _, _ in moves(widths, back))


@triton.constexpr_function
def level_assembly(widths):
    """PTX that converts two words at once: outputs $0 for the even planes and $1 for the odd ones; inputs $2, the words, and $3 and
    so on, the words before."""
    shifts = sorted({(word, shift) for back in (1, 2, 3) for word, shift, _ in moves(widths, back) if shift})
    sources = {(word, 0): f"${2 + word}" for word in range(words_before(widths) + 1)}
    sources |= {where: f"t{number}" for number, where in enumerate(shifts)}
    lines = ["{", f".reg .b32 {', '.join(['z', *(sources[where] for where in shifts)])};"]
    for word, shift in shifts:
        lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 {sources[word, shift]}, ${2 + word}, {abs(shift)};")
    held = "$2"
    for word, shift, bits in [*moves(widths, 1), *moves(widths, 3)]:
        # z1: held ^ (source & bits)
        lines.append(f"lop3.b32 z, {held}, {sources[word, shift]}, 0x{bits:04x}{bits:04x}, 0x78;")
        held = "z"
    for kind in range(2):
        held = "z"
        for word, shift, bits in moves(widths, 2):
            # z0: bits of the source where `own` has them, else bits of `held`
            if own := bits & below(widths, kind):
                lines.append(f"lop3.b32 ${kind}, {held}, {sources[word, shift]}, 0x{own:04x}{own:04x}, 0xD8;")
                held = f"${kind}"
        lines += [f"mov.b32 ${kind}, z;"] * (held == "z")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def level_constraints(widths):
    """Operand constraints of `level_assembly`."""
    return "=&r,=&r" + ",r" * (1 + words_before(widths))


@triton.jit
def _moved(words, WIDTHS: tl.constexpr, BACK: tl.constexpr):
    """Applies all moves of one distance BACK to the words; plain operations."""
    found = words[0] & 0
    for step in tl.static_range(len(moves(WIDTHS, BACK))):
        source = words[moves(WIDTHS, BACK)[step][0]]
        if moves(WIDTHS, BACK)[step][1] > 0:
            source = source << moves(WIDTHS, BACK)[step][1]
        else:
            source = source >> -moves(WIDTHS, BACK)[step][1]
        found |= source & moves(WIDTHS, BACK)[step][2]
    return found


@triton.jit
def level_words(words, WIDTHS: tl.constexpr, PLAIN: tl.constexpr):
    """Converts int16 words to those of the even planes and of the odd planes. `words` is a tuple: the words, then the
    `words_before` earlier ones, 0 where a token has none. PLAIN: use plain operations, with the same bits."""
    if PLAIN:
        wide = ()
        for number in tl.static_range(len(words)):
            wide += (words[number].to(tl.int32),)
        kept = wide[0] ^ _moved(wide, WIDTHS, 1) ^ _moved(wide, WIDTHS, 3)
        lowest = _moved(wide, WIDTHS, 2)
        even = (kept & ~below(WIDTHS, 0)) | (lowest & below(WIDTHS, 0))
        odd = (kept & ~below(WIDTHS, 1)) | (lowest & below(WIDTHS, 1))
        return even.to(tl.int16), odd.to(tl.int16)
    else:
        return tl.inline_asm_elementwise(
            level_assembly(WIDTHS),
            level_constraints(WIDTHS),
            words,
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
