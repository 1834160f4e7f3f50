"""The attention kernel, interpreted, against float64: a page is a block of any length, and values have scales per channel."""

import pytest
import torch
from attended_by_kernel import asked, assert_same, whole
from paged_attention import Kind, Pages, pages_of

from calib.kernels.attend import triton
from calib.kernels.attend.options import turn_of

pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

PAGES = (20, 40, 60, 64, 100)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed. One program reads all pages of a head, unless a
    test sets more."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "room", lambda shape, like: torch.full(shape, torch.nan))
    monkeypatch.setattr(triton, "_programs", lambda device: 1)


def block(page: int, bits: int, channels: int = 32, heads: int = 2, scaled: bool = True) -> tuple[Pages, Pages]:
    """Keys with a range a channel and page, values with a scale and zero point a token; three pages."""
    shape = (3, heads, page, channels)
    keys = pages_of(Kind(bits, "channel", page), shape, 1)
    return keys, pages_of(Kind(bits, "token"), shape, 2, scaled=scaled)


@pytest.mark.parametrize(("bits", "channels"), [(4, 32), (2, 64), (3, 80), (1, 128)])
@pytest.mark.parametrize("page", PAGES)
def test_blocks(page, bits, channels):
    """Some slots of the last page are not in use."""
    keys, values = block(page, bits, channels)
    span = whole(keys, [2, 0, 1], used=[2 * page + page // 3])
    assert_same(asked(keys, query_rows=3), keys, values, span, precise=bits % 2 == 0)


@pytest.mark.parametrize("whole_pages", [0, 1])
@pytest.mark.parametrize("page", PAGES)
def test_blocks_in_many_runs_with_scores_and_masks(page, whole_pages, monkeypatch):
    """Returned scores cover the whole page table: a page that a row does not use has scores of -inf."""
    monkeypatch.setattr(triton, "_programs", lambda device: 16)
    keys, values = block(page, 4)
    query, draw = asked(keys, rows=2), torch.Generator().manual_seed(5)
    hidden = torch.rand(2, 2, 2 * page, generator=draw) < 0.3
    bias = torch.randn(2, 2, 2, 2 * page, generator=draw)
    positions = torch.arange(3 * 2 * page, dtype=torch.int32).mul(89).remainder(211).view(3, 2, page, 1)
    back = torch.tensor([[40], [90]], dtype=torch.int32)
    masks = {"hidden": hidden, "bias": bias, "positions": positions, "back": back}
    span = whole(keys, [2, 1], [0, 1], used=[2 * page, whole_pages * page + 3], **masks)
    assert_same(query, keys, values, span, scored=True, precise=True)


@pytest.mark.parametrize("constant", [slice(0, 2), slice(0, 3)], ids=["first pages", "all pages"])
def test_tokens_whose_channels_are_all_equal(constant):
    """Such tokens have a step of 0 and their value as zero point, times the page's scales of channels."""
    keys, values = block(40, 4)
    values.stream.parameters[constant, ..., 0] = 0
    zero_points, scales = values.stream.parameters[constant, ..., 1:], values.stream.scales[constant]
    values.tokens[constant] = zero_points.double() * scales.double()
    assert_same(asked(keys), keys, values, whole(keys, [0, 1, 2]), precise=True)


def test_what_lies_behind_the_last_page_is_not_read():
    """A page of 20 tokens ends inside a turn of 32. Memory behind the last page holds NaN, which must not reach the result."""
    keys, values = block(20, 4)
    for pages in (keys, values):
        stream = pages.stream
        for part in (stream.pages, stream.parameters):
            grown = torch.cat([part, torch.full_like(part[:1], 0x7BFF if part.dtype == torch.int16 else torch.nan)])
            part.set_(grown.untyped_storage(), 0, part.shape, grown.stride())
    assert_same(asked(keys), keys, values, whole(keys, [2]), precise=True)


def test_turns():
    def turn(page: int, group: int) -> int:
        shape = (1, 1, page, 32)
        return turn_of(
            pages_of(Kind(4, "channel", group), shape, 1).stream, pages_of(Kind(4, "token"), shape, 2).stream
        )

    assert [turn(page, page) for page in (20, 40, 60, 64, 100, 128)] == [32, 64, 64, 64, 128, 128]
    assert turn(128, 32) == 32 and turn(40, 20) == 4  # short groups of tokens leave a short turn
