"""Words of trellis-coded levels inside a kernel, made ready to be unpacked (`kernels/trellis`).

A field of b bits stores u and b - 1 others, f, and its level is 4 f + 2 z1 + z0, by the u of the fields before it:

    z1[n] = u[n] ^ u[n-1] ^ u[n-3]        z0[n] = u[n-2]

So the number of a level is the field with z1 in the place of u, and z0 below it, where the field before ends. A word becomes two,
each with z1: one of the even planes, with their z0 over the last bits of the odd ones, and one of the odd planes. The first
plane's z0 has no field below it and lies at bit 15 of the word that has no use for the last plane. The u before a word's own are
in the word before it, or in the one before that: a token's words are one path. Which bits go where follows from the widths, so
that fields that are as far from the one that they need share a shift.
"""

import triton
import triton.language as tl

from calib.kernels.attend.unpack import begin_of, first_parity, plane_count


@triton.constexpr_function
def below(widths, parity):
    """The bits in which z0 of the even planes (`parity` 0) or of the odd ones lie in their word."""
    bits = sum(1 << begin_of(widths, plane) for plane in range(parity or 2, plane_count(widths), 2))
    return bits | (1 << 15 if parity == first_parity(widths) else 0)


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
    """PTX for two words at once: $0 the words of the even planes, $1 of the odd ones, from the words in $2 and those before in $3
    and so on."""
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
            # z0: the source where its bits are, held where they are not
            if own := bits & below(widths, kind):
                lines.append(f"lop3.b32 ${kind}, {held}, {sources[word, shift]}, 0x{own:04x}{own:04x}, 0xD8;")
                held = f"${kind}"
        lines += [f"mov.b32 ${kind}, z;"] * (held == "z")
    return "\n".join([*lines, "}"])


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
    those of the even planes and of the odd ones, int16. With `PLAIN` by plain operations, the same bits."""
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
