"""What a program of `decode_kernel.py` reads: queries by planes, words of a head's tokens and their sizes, parameters of a plane's
channels."""

import triton
import triton.language as tl

from calib.kernels.attend.packed_pages import SIZE_BITS, SIZE_OF_ONE
from calib.kernels.attend.trellis_levels import level_words, words_before
from calib.kernels.attend.unpack import is_trellis

# Sizes as bits of float32 numbers, whose exponent begins at the 23rd: half of a number of a size goes there. Even numbers have the
# root of 2 behind it, odd ones nothing and half an exponent more.
_EXPONENT, _ROOT_OF_TWO = tl.constexpr(1 << 23), tl.constexpr(0x3504F3)
_BITS, _LARGEST = tl.constexpr(SIZE_BITS), tl.constexpr((1 << SIZE_BITS) - 1)
_OF_ZERO = tl.constexpr(((127 - (SIZE_OF_ONE + 1) // 2) << 23) + 0x3504F3)


@triton.jit
def query_planes(QUERY, base, scale, rows, valid, F: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, D: tl.constexpr):
    """The query times `scale` by planes, float32 [WP, M] each."""
    words = tl.arange(0, WP)
    found = ()
    for f in tl.static_range(F):
        channels = f * W + words
        inside = ((words < W) & (channels < D))[:, None] & valid[None, :]
        plane = tl.load(QUERY + base + rows[None, :] * D + channels[:, None], mask=inside, other=0.0)
        found += (plane.to(tl.float32) * scale,)
    return found


@triton.jit
def map_numbers(
    NUMBERS, at, step, words, other: tl.constexpr, F: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """A number of each channel by planes, [WP] each, as they are stored; `other` where there is no channel. Numbers of a head begin
    `at`, `step` apart; none of None. All are asked for before any is used, so a program waits for memory once."""
    found = ()
    if NUMBERS is not None:
        for f in tl.static_range(F):
            channels = f * W + words
            inside = (words < W) & (channels < D)
            found += (tl.load(NUMBERS + at + channels * step, mask=inside, other=other),)
    return found


@triton.jit
def channel_maps(
    STEP, ZERO, SCALE, SHIFT, step_at, step_channel, map_at, map_channel, words, F: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """What all tokens' channels share, each as `map_numbers` has it: codes' steps and zero points, a map's scales and shifts."""
    steps = map_numbers(STEP, step_at, step_channel, words, 1.0, F, D, W)
    zero_points = map_numbers(ZERO, step_at, step_channel, words, 0.0, F, D, W)
    scales = map_numbers(SCALE, map_at, map_channel, words, 1.0, F, D, W)
    shifts = map_numbers(SHIFT, map_at, map_channel, words, 0.0, F, D, W)
    return steps, zero_points, scales, shifts


@triton.jit
def folded_query(query, constant, scales, zeros, DIVIDES: tl.constexpr):
    """For tokens that are scale y + zero in every channel, or y / scale + zero: the query that meets y, by planes, and the
    `constant` [M] with what it makes of the zeros. Numbers as `map_numbers` has them; none: 1, or 0."""
    found = ()
    for f in tl.static_range(len(query)):
        if len(zeros) > 0:
            constant += tl.sum(query[f] * zeros[f].to(tl.float32)[:, None], 0)
        if len(scales) > 0:
            scale = scales[f].to(tl.float32)[:, None]
            found += (query[f] / scale if DIVIDES else query[f] * scale,)
        else:
            found += (query[f],)
    return found, constant


@triton.jit
def folded_mixture(mixed, mass, scales, zeros, plane: tl.constexpr, DIVIDES: tl.constexpr):
    """What a plane's mixture [WP, M] and `mass` [M] of y are of such tokens."""
    if len(scales) > 0:
        scale = scales[plane].to(tl.float32)[:, None]
        mixed = mixed / scale if DIVIDES else mixed * scale
    if len(zeros) > 0:
        mixed += zeros[plane].to(tl.float32)[:, None] * mass[None, :]
    return mixed


@triton.jit
def vector_products(
    query, VECTORS, at, words, RANK: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """The products [M] of a query by planes with each of RANK vectors, which lie behind each other and begin `at`."""
    found = ()
    for j in tl.static_range(RANK):
        product = tl.zeros([query[0].shape[1]], tl.float32)
        for f in tl.static_range(len(query)):
            channels = f * W + words
            inside = (words < W) & (channels < D)
            vector = tl.load(VECTORS + at + j * D + channels, mask=inside, other=0.0).to(tl.float32)
            product += tl.sum(query[f] * vector[:, None], 0)
        found += (product,)
    return found


@triton.jit
def largest_of(query):
    """The largest size of each row of a query by planes, at least a tiny one: float32 [M]."""
    size = tl.full([query[0].shape[1]], 1.0e-30, tl.float32)
    for f in tl.static_range(len(query)):
        size = tl.maximum(size, tl.max(tl.abs(query[f]), 0))
    return size


@triton.jit
def own_words(FIRST, head, stride, words, W: tl.constexpr, PIECE: tl.constexpr):
    """Of a token in a page: where a head's words begin, and which of `words` it has, W at most. Where heads lie side by side FIRST
    says so, in pieces that one load may take."""
    if FIRST is None:
        return head * stride, words < W
    else:
        first = tl.multiple_of(tl.load(FIRST + head), PIECE)
        return first, words < tl.multiple_of(tl.load(FIRST + head + 1) - first, PIECE)


@triton.jit
def tile_of(pointers, inside, in_page, FULL: tl.constexpr, RAGGED: tl.constexpr):
    """Words of some tokens, 0 where a token has none and, in RAGGED pages, where there is no token; a mask that hides nothing would
    keep loads from being wide."""
    if RAGGED:
        return tl.load(pointers, mask=inside & in_page, other=0)
    elif FULL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def code_words(
    pointers, numbers, inside, in_page, WIDTHS: tl.constexpr, FULL: tl.constexpr, RAGGED: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Words as `unpacked` takes them: what `tile_of` reads; of trellis-coded levels those of even planes and of odd ones, of others
    the words again (Triton 3.6 has no None in a tuple). `numbers` are those of the words among their token's."""
    words = tile_of(pointers, inside, in_page, FULL, RAGGED)
    if is_trellis(WIDTHS):
        found = (words,)
        for back in tl.static_range(1, words_before(WIDTHS) + 1):
            found += (tl.load(pointers - back, mask=inside & in_page & (numbers >= back), other=0),)
        return level_words(found, WIDTHS, PLAIN)
    else:
        return words, words


@triton.jit
def token_parameters(numbers, slot, in_page, GROUPS: tl.constexpr, RAGGED: tl.constexpr):
    """The step and the zero point of each group of a token's channels, as two tuples of float32 [BN]; 0 where RAGGED pages have no
    token. A token's steps lie side by side, its zero points behind them. They are read as pairs, words of 4 bytes: only loads of
    so many can be under way while another turn is computed."""
    pairs = numbers.to(tl.pointer_type(tl.int32), bitcast=True) + slot * GROUPS
    found = ()
    for j in tl.static_range(GROUPS):
        if RAGGED:
            pair = tl.load(pairs + j, mask=in_page, other=0)
        else:
            pair = tl.load(pairs + j)
        first, second = _halves(pair)
        found += (first.to(tl.float32), second.to(tl.float32))
    steps, zero_points = (), ()
    for j in tl.static_range(GROUPS):
        steps += (found[j],)
        zero_points += (found[GROUPS + j],)
    return steps, zero_points


@triton.jit
def token_coefficients(
    numbers, slot, inside, RANK: tl.constexpr
):  # fmt: skip
    """A token's coefficients, RANK side by side, as a tuple of float32 [BN]; an even number of 16 bits each are read as pairs."""
    found = ()
    if RANK % 2 == 0 and numbers.dtype.element_ty == tl.float16:
        pairs = numbers.to(tl.pointer_type(tl.int32), bitcast=True) + slot * (RANK // 2)
        for j in tl.static_range(RANK // 2):
            first, second = _halves(tl.load(pairs + j, mask=inside, other=0))
            found += (first.to(tl.float32), second.to(tl.float32))
    else:
        for j in tl.static_range(RANK):
            found += (tl.load(numbers + slot * RANK + j, mask=inside, other=0.0).to(tl.float32),)
    return found


@triton.jit
def plane_numbers(numbers, words, plane, D: tl.constexpr, W: tl.constexpr):
    """A number of each of a plane's channels, float32 [WP]."""
    channels = plane * W + words
    return tl.load(numbers + channels, mask=(words < W) & (channels < D), other=0.0).to(tl.float32)


@triton.jit
def channel_numbers(
    numbers, words, plane, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, ONE_WARP: tl.constexpr, FOLDED: tl.constexpr
):  # fmt: skip
    """float16 scales and zero points [WP] of a plane's channels, from a row of parameters. A load goes a turn ahead where each lane
    that takes part has 4 bytes, two numbers: where there are as many channels as lanes, both kinds are one load. Of fewer, zero
    points that go into a product as they are (FOLDED) would be read by each lane for itself, but not as words of two."""
    if ONE_WARP and FOLDED and WP < 32 and W == WP and D % W == 0:
        pairs = numbers.to(tl.pointer_type(tl.int32), bitcast=True) + plane * (W // 2) + tl.arange(0, WP // 2)
        steps, zero_points = _halves(tl.load(pairs)), _halves(tl.load(pairs + D // 2))
        return tl.join(steps[0], steps[1]).reshape(WP), tl.join(zero_points[0], zero_points[1]).reshape(WP)
    channels = plane * W + words
    inside = (words < W) & (channels < D)
    if ONE_WARP and WP >= 32:
        both = channels[:, None] + D * tl.arange(0, 2)[None, :]
        return tl.split(tl.load(numbers + both, mask=inside[:, None], other=0.0))
    else:
        zero_points = tl.load(numbers + D + channels, mask=inside, other=0.0)
        return tl.load(numbers + channels, mask=inside, other=0.0), zero_points


@triton.jit
def _halves(pairs):
    """The two float16 numbers of words of 4 bytes."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def token_sizes(SIZES, at, head, in_page, WORDS: tl.constexpr, RAGGED: tl.constexpr):
    """The size of each token, float32 [BN]. Its number lies in the word `at`, which has fields of several heads: of 16 bits, or of
    8."""
    if RAGGED:
        word = tl.load(SIZES + at, mask=in_page, other=0)
    else:
        word = tl.load(SIZES + at)
    return size_of((word.to(tl.int32) >> (head // WORDS * _BITS)) & _LARGEST)


@triton.jit
def size_of(number):
    """s = 2^((i - 5) / 2) of its number i int32, exactly as float32 rounds it."""
    bits = number * (_EXPONENT // 2) + _OF_ZERO + (number & 1) * (_EXPONENT // 2 - _ROOT_OF_TWO)
    return bits.to(tl.float32, bitcast=True)
