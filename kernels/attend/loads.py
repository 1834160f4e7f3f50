"""What a program of `decode_kernel.py` reads: queries by planes, words of a head's tokens, parameters of a plane's channels."""

import triton
import triton.language as tl


@triton.jit
def query_planes(QUERY, base, rows, valid, F: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, D: tl.constexpr):
    """The query by planes, float32 [WP, M] each, and the largest size of each row, at least a tiny one."""
    words = tl.arange(0, WP)
    found, size = (), tl.full([rows.shape[0]], 1.0e-30, tl.float32)
    for f in tl.static_range(F):
        channels = f * W + words
        inside = ((words < W) & (channels < D))[:, None] & valid[None, :]
        plane = tl.load(QUERY + base + rows[None, :] * D + channels[:, None], mask=inside, other=0.0)
        found += (plane,)
        size = tl.maximum(size, tl.max(tl.abs(plane), 0))
    return found, size


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
def token_number(pointers, in_page, RAGGED: tl.constexpr):
    """A number of each token, float32 [BN]; 0 where RAGGED pages have no token."""
    if RAGGED:
        return tl.load(pointers, mask=in_page, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def plane_numbers(numbers, words, plane, D: tl.constexpr, W: tl.constexpr):
    """A number of each of a plane's channels, float32 [WP]."""
    channels = plane * W + words
    return tl.load(numbers + channels, mask=(words < W) & (channels < D), other=0.0).to(tl.float32)


@triton.jit
def channel_numbers(numbers, words, plane, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr):
    """float16 scales and zero points [WP] of a plane's channels, from a row of parameters."""
    channels = plane * W + words
    inside = (words < W) & (channels < D)
    return tl.load(numbers + channels, mask=inside, other=0.0), tl.load(numbers + D + channels, mask=inside, other=0.0)
