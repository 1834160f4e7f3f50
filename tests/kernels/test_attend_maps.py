"""Attention's kernels apply the scale of scores and affine maps of channels (`ChannelMap`) themselves, interpreted."""

from dataclasses import replace

import pytest
import torch
from attended_by_kernel import asked, whole
from paged_attention import Kind, assert_attended, attention, pages_of
from tolerances import FLOAT32_ATTENTION, SPLIT_SCORES

from calib.kernels.attend import operation, triton
from calib.kernels.attend.operation import ChannelMap, ExactGroup, ExactTokens

pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ROWS, HEADS, PAGE, CHANNELS = 2, 2, 64, 40


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "_programs", lambda device: 16)


def mapped(pages, rows, scale, zero, divides):
    """The stream with a map of these shapes, and the mapped tokens of each row, float64 `[rows, pages, kv_heads, ...]`."""
    draw = torch.Generator().manual_seed(9)
    scales = None if scale is None else (0.5 + torch.rand(scale, generator=draw)).half()
    zeros = None if zero is None else torch.randn(zero, generator=draw).half()
    tokens = pages.tokens.expand(rows, *pages.tokens.shape)
    for part, join in ((scales, torch.div if divides else torch.mul), (zeros, torch.add)):
        if part is not None:
            tokens = join(tokens, part.double().view(*[1] * (4 - part.ndim), *part.shape)[:, None])
    return replace(pages.stream, map=ChannelMap(scales, zeros, divides)), tokens.expand(rows, *pages.tokens.shape)


@pytest.mark.full
@pytest.mark.parametrize("kinds", ["fixed token", "token channel", "channel fixed"])
@pytest.mark.parametrize(
    ("scale", "zero", "divides"),
    [
        ((ROWS, HEADS, 1, CHANNELS), (ROWS, HEADS, 1, CHANNELS), False),
        ((HEADS, 1, CHANNELS), None, False),
        ((ROWS, HEADS, 1, CHANNELS), None, True),
        (None, (1, 1, 1), False),
    ],
    ids=["rows", "heads", "divisors", "one zero"],
)
def test_maps_of_channels(kinds, scale, zero, divides):
    """Attention over streams with a map is that of float64 over the mapped tokens. (The kernel applies the map of keys to the
    query, and that of values to the mixture.)"""
    shape = (3, HEADS, PAGE, CHANNELS)
    kinds = [Kind(4, name, 32 if name == "channel" else 1) for name in kinds.split()]
    keys, values = (pages_of(kind, shape, seed) for seed, kind in enumerate(kinds))
    streams, tokens = zip(*(mapped(part, ROWS, scale, zero, divides) for part in (keys, values)), strict=True)
    query, span = asked(keys, ROWS, 3), whole(keys, [2, 1], [0, 2], used=[100, 70])
    found = operation.attend_pages(query, *streams, span, precise=True)
    for row in range(ROWS):
        own = whole(keys, span.table[row].tolist(), used=[int(span.used[row])])
        parts = (replace(part, tokens=of_rows[row]) for part, of_rows in zip((keys, values), tokens, strict=True))
        expected = attention(query[row : row + 1], *parts, own)
        part = replace(found, **{name: getattr(found, name)[row : row + 1] for name in ("top", "mass", "mixed")})
        assert_attended(part, expected, tokens[1][row], SPLIT_SCORES, FLOAT32_ATTENTION)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_query_as_the_model_made_it_is_scaled_in_the_kernels(dtype):
    """A query in 16 bits with `scale` gives the same bits as the query multiplied by it in float32 before; the output of exact
    tokens is in the query's dtype."""
    keys, values = (pages_of(Kind(4, "token"), (2, HEADS, PAGE, 32), seed) for seed in range(2))
    query, scale, span = asked(keys, query_rows=4, size=6.0).to(dtype), 0.3, whole(keys, [1, 0], used=[90])
    found, expected = (
        operation.attend_pages(own, keys.stream, values.stream, span, scale=factor)
        for own, factor in ((query, scale), (query.float() * scale, 1.0))
    )
    for name in ("top", "mass", "mixed"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    new = torch.randn(1, HEADS, 5, 32, generator=torch.Generator().manual_seed(4)).to(dtype)
    tokens = ExactTokens((ExactGroup(new, new),))
    out = operation.attend_exact(query, tokens, [found], scale=scale).output
    plain = operation.attend_exact(query.float() * scale, tokens, [found]).output
    assert out.dtype == dtype and plain.dtype == torch.float32
    assert torch.equal(out, plain.to(dtype))
