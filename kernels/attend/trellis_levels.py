"""Words of trellis-coded levels inside a kernel, made ready to be unpacked (`kernels/trellis`).

A field of b bits stores u and b - 1 others, f, and its level is 4 f + 2 z1 + z0, by the u of the fields before it:

    z1[n] = u[n] ^ u[n-1] ^ u[n-3]        z0[n] = u[n-2]

So the number of a level is the field with z1 in the place of u, and z0 below it. A word becomes two: the same with all z1, and its
z0, each one bit below where its field begins, the first one at bit 15. The u before a word's own are in the word before it, or in
the one before that: a token's words are one path. Which bits go where follows from the widths, so that fields that are as far from
the one that they need share a shift.
"""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import begin_of, plane_count


@triton.constexpr_function
def lowest_bits(widths):
    """The bits of a word in which u lie."""
    return sum(1 << begin_of(widths, plane) + 1 for plane in range(plane_count(widths)))


@triton.constexpr_function
def moves(widths, back):
    """[(which word: 0 itself, 1 the one before, ...; its shift to the left; bits of u that go so)]: of the fields `back` before."""
    count, found = plane_count(widths), {}
    for plane in range(count):
        word, other = 0, plane - back
        while other < 0:
            word, other = word + 1, other + count
        begin = begin_of(widths, plane) + 1
        # z0 lies one bit lower, and the first field's in the last bit.
        target = begin if back != 2 else (begin - 1) % 16
        shift = target - begin_of(widths, other) - 1
        found[word, shift] = found.get((word, shift), 0) | 1 << target
    return [(word, shift, bits) for (word, shift), bits in sorted(found.items())]


@triton.constexpr_function
def words_before(widths):
    """How many words before a word its levels hang on."""
    return max(word for back in (1, 2, 3) for word, _, _ in moves(widths, back))


@triton.constexpr_function
def level_assembly(widths):
    """PTX for two words at once: $0 the words with z1, $1 their z0, from the words in $2 and those before in $3 and so on."""
    lines = ["{", ".reg .b32 t, z;", "mov.b32 z, $2;", "mov.b32 $1, 0;"]
    steps = [(word, shift, bits, back) for back in (1, 2, 3) for word, shift, bits in moves(widths, back)]
    held = None
    for word, shift, bits, back in sorted(steps):
        if shift and (word, shift) != held:
            lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 t, ${2 + word}, {abs(shift)};")
            held = word, shift
        source, mask = "t" if shift else f"${2 + word}", f"0x{bits:04x}{bits:04x}"
        # z ^ (source & mask), or $1 | (source & mask)
        lines.append(
            f"lop3.b32 $1, $1, {source}, {mask}, 0xF8;" if back == 2 else f"lop3.b32 z, z, {source}, {mask}, 0x78;"
        )
    own = f"0x{lowest_bits(widths):04x}{lowest_bits(widths):04x}"
    return "\n".join([*lines, f"lop3.b32 $0, $2, z, {own}, 0xD8;", "}"])  # z where a u was


@triton.constexpr_function
def level_constraints(widths):
    """Operands of `level_assembly`."""
    return "=&r,=&r" + ",r" * (1 + words_before(widths))


@triton.jit
def _moved(words, WIDTHS: tl.constexpr, BACK: tl.constexpr):
    """All moves of one distance."""
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
    """Of int16 `words`, a tuple of the words themselves and as many before them as `words_before` says, 0 where a token has none:
    words with z1, and their z0, int16. With `PLAIN` by plain operations, the same bits."""
    if PLAIN:
        wide = ()
        for number in tl.static_range(len(words)):
            wide += (words[number].to(tl.int32),)
        first = wide[0] ^ _moved(wide, WIDTHS, 1) ^ _moved(wide, WIDTHS, 3)
        kept = (wide[0] & ~lowest_bits(WIDTHS)) | (first & lowest_bits(WIDTHS))
        return kept.to(tl.int16), _moved(wide, WIDTHS, 2).to(tl.int16)
    else:
        return tl.inline_asm_elementwise(
            level_assembly(WIDTHS),
            level_constraints(WIDTHS),
            words,
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
