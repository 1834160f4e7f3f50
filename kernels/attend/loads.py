"""Loads of `decode_kernel.py`: queries by planes, words and sizes of a head's tokens, parameters of tokens and channels.

Suffixes: F planes of W words (WP with padding), D channels, M query rows, BN tokens of a tile. "By planes" is a tuple of F blocks
[WP, ...], where row w of block f is channel f W + w.
"""

import triton
import triton.language as tl

from calib.kernels.attend.packed_pages import SIZE_BITS, SIZE_OF_ONE
from calib.kernels.attend.trellis_levels import level_words, words_before
from calib.kernels.attend.unpack import is_trellis

# Bits of a size s = 2^((i - 5) / 2) as float32, whose exponent begins at bit 23: half of i goes into the exponent. For even i the
# mantissa is that of the root of 2; for odd i it is 0, and the exponent is one half larger.
_EXPONENT, _ROOT_OF_TWO = tl.constexpr(1 << 23), tl.constexpr(0x3504F3)
_BITS, _LARGEST = tl.constexpr(SIZE_BITS), tl.constexpr((1 << SIZE_BITS) - 1)
_OF_ZERO = tl.constexpr(((127 - (SIZE_OF_ONE + 1) // 2) << 23) + 0x3504F3)


@triton.jit
def query_planes(QUERY, base, scale, rows, valid, F: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, D: tl.constexpr):
    """Loads the query times `scale` by planes, float32 [WP, M] each."""
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
    """Loads a number per channel by planes, [WP] each, in the stored dtype; `other` where there is no channel. The head's numbers
    begin at `at`, with stride `step`. () if NUMBERS is None. All loads are issued before one is used, so a program waits once."""
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
    """Loads the numbers per channel that all tokens share, each by `map_numbers`: steps and zero points of codes (`fixed`), scales
    and shifts of a `ChannelMap`."""
    steps = map_numbers(STEP, step_at, step_channel, words, 1.0, F, D, W)
    zero_points = map_numbers(ZERO, step_at, step_channel, words, 0.0, F, D, W)
    scales = map_numbers(SCALE, map_at, map_channel, words, 1.0, F, D, W)
    shifts = map_numbers(SHIFT, map_at, map_channel, words, 0.0, F, D, W)
    return steps, zero_points, scales, shifts


@triton.jit
def folded_query(query, constant, scales, zeros, DIVIDES: tl.constexpr):
    """Folds a channel map x = scale y + zero (or y / scale + zero) into the query: return the query for y, by planes, and
    `constant` [M] plus query times zeros. Numbers as from `map_numbers`; an empty tuple stands for 1 or 0."""
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
    """Applies such a channel map to a plane's mixture [WP, M] of y with sum of weights `mass` [M]."""
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
    """Products [M] of a query by planes with each of RANK vectors, which are stored one after the other from `at` on."""
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
    """Largest magnitude of each row of a query by planes, at least 1e-30: float32 [M]."""
    size = tl.full([query[0].shape[1]], 1.0e-30, tl.float32)
    for f in tl.static_range(len(query)):
        size = tl.maximum(size, tl.max(tl.abs(query[f]), 0))
    return size


@triton.jit
def own_words(FIRST, head, stride, words, W: tl.constexpr, PIECE: tl.constexpr):
    """Offset of a head's words in a token's row or page, and which of `words` belong to the head, W at most. If all heads share a
    row, FIRST has the offsets, which are multiples of PIECE so that loads can be wide."""
    if FIRST is None:
        return head * stride, words < W
    else:
        first = tl.multiple_of(tl.load(FIRST + head), PIECE)
        return first, words < tl.multiple_of(tl.load(FIRST + head + 1) - first, PIECE)


@triton.jit
def tile_of(pointers, inside, in_page, FULL: tl.constexpr, RAGGED: tl.constexpr):
    """Loads words of a tile of tokens; 0 where a head has no word and, in RAGGED pages, where there is no token. If FULL, no mask
    is used, because even a mask that is always true prevents wide loads."""
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
    """Loads words for `unpacked`: for trellis-coded levels a pair, the words of even planes and those of odd planes, else the words
    twice (Triton 3.6 allows no None in a tuple). `numbers` are the indices of the words within their token."""
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
    """Loads the step and the zero point of each group of a token's channels, as two tuples of float32 [BN]; 0 where RAGGED pages
    have no token. A token's steps are contiguous, followed by its zero points. They are read in pairs, as 4-byte words: only loads
    of at least 4 bytes can be pipelined across loop iterations."""
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
    """Loads a token's RANK contiguous coefficients, as a tuple of float32 [BN]; an even number of float16 ones is read in pairs."""
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
    """Loads a number per channel of a plane, float32 [WP]."""
    channels = plane * W + words
    return tl.load(numbers + channels, mask=(words < W) & (channels < D), other=0.0).to(tl.float32)


@triton.jit
def channel_numbers(
    numbers, words, plane, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, ONE_WARP: tl.constexpr, FOLDED: tl.constexpr
):  # fmt: skip
    """Loads float16 scales and zero points [WP] of a plane's channels from a row of parameters. A load is pipelined across loop
    iterations only if each participating lane loads 4 bytes, two numbers. With at least 32 channels, a scale and a zero point of
    each channel form one load; with fewer, and FOLDED, two channels do."""
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
    """Splits 4-byte words into two float16 numbers."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def token_sizes(SIZES, at, head, in_page, WORDS: tl.constexpr, RAGGED: tl.constexpr):
    """Loads the size of each token, float32 [BN]. Its number is a field of the word at `at`, which has 16 or 8 bits and is shared
    by several heads."""
    if RAGGED:
        word = tl.load(SIZES + at, mask=in_page, other=0)
    else:
        word = tl.load(SIZES + at)
    return size_of((word.to(tl.int32) >> (head // WORDS * _BITS)) & _LARGEST)


@triton.jit
def size_of(number):
    """s = 2^((i - 5) / 2) of numbers i int32, rounded to float32."""
    bits = number * (_EXPONENT // 2) + _OF_ZERO + (number & 1) * (_EXPONENT // 2 - _ROOT_OF_TWO)
    return bits.to(tl.float32, bitcast=True)
