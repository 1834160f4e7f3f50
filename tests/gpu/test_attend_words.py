"""Attention over words with fields of different widths, over keys that are rotated in the kernel, and with a low-rank part, against
float64."""

from dataclasses import replace

import pytest
import torch
from gpu.moved import moved, near
from mixed_words import NARROW, PAGE, WIDE, Words, stored
from paged_attention import Kind, Pages, attention, pages_of
from predicted_values import predicted_values
from rotated_keys import HEADS, keys_of, make_rope_tables, tables
from sized_tokens import sized_keys, sizes_of

from calib.kernels.attend.operation import LowRankTerm, PageSpan, attend_pages, supported
from calib.runtime.rotation import Rotation

# As in test_attend.py.
OUTPUT, PRECISE = 2e-3, 1e-4

EVEN = Words((6, 4, 3, 2, 1), (16, 16, 16))
USED = torch.tensor([117], dtype=torch.int32)
TABLE = torch.tensor([[2, 0]], dtype=torch.int32)


def asked(channels: int, query_rows: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(1, HEADS, query_rows, channels, generator=draw) * 2 / channels**0.5


def assert_same(device, query, keys, values, rope_tables=None, rotated=None) -> None:
    span = PageSpan(TABLE, USED)
    expected = attention(query, keys, values, span, rotated=rotated)
    given = moved((query, keys.stream, values.stream, span), device)
    assert supported(query.shape[2], *given[1:3], rope_tables=rope_tables is not None)
    for precise, limit in ((False, OUTPUT), (True, PRECISE)):
        found = attend_pages(*given, precise=precise, rope_tables=moved(rope_tables, device))
        near(found.mixed / found.mass, expected.output, limit)
        near(found.top + found.mass.log(), expected.normaliser, limit)


@pytest.mark.parametrize(("keys", "values"), [(EVEN, EVEN), (NARROW, WIDE), (WIDE, EVEN)], ids=str)
@pytest.mark.parametrize("query_rows", [1, 4, 16])
def test_fields_of_different_widths(device, keys, values, query_rows):
    keys, values = stored(keys, 1), stored(values, 2)
    query = asked(keys.tokens.shape[-1], query_rows) * (keys.tokens.abs().amax((0, 2)) > 0)[:, None]
    assert_same(device, query, keys, values)


@pytest.mark.parametrize(
    ("own", "channels", "pairs"), [(EVEN, 128, 64), (NARROW, 64, 16), (WIDE, 48, 24), (EVEN, 256, 128)], ids=str
)
@pytest.mark.parametrize("query_rows", [1, 4, 65])
def test_keys_before_rope(device, own, channels, pairs, query_rows):
    rotation = Rotation(10000.0 ** -torch.linspace(0, 1, pairs, dtype=torch.float64))
    keys, rope_tables = keys_of(own, channels, 1)
    rope_tables = replace(rope_tables, **tables(rotation, 1004, 2 * PAGE))
    rotated = make_rope_tables(rotation, 1004 + torch.arange(2 * PAGE))
    assert_same(device, asked(channels, query_rows), keys, stored(EVEN, 2), rope_tables, rotated)


@pytest.mark.parametrize(("own", "channels", "pairs"), [(EVEN, 128, 64), (NARROW, 64, 16)], ids=str)
@pytest.mark.parametrize("query_rows", [1, 4, 16, 65])
def test_values_that_keys_predict(device, own, channels, pairs, query_rows):
    rotation = Rotation(10000.0 ** -torch.linspace(0, 1, pairs, dtype=torch.float64))
    (plain, rope_tables), sizes = keys_of(own, channels, 1), sizes_of(HEADS, PAGE, 7, 9)
    rope_tables = replace(rope_tables, **tables(rotation, 1004, 2 * PAGE))
    keys, of_values = sized_keys(plain, rope_tables, sizes), sizes_of(HEADS, PAGE, 8, 9)
    values, fold = predicted_values(stored(EVEN, 2), EVEN, of_values, keys, own, sizes)
    rotated = make_rope_tables(rotation, 1004 + torch.arange(2 * PAGE))
    query, span = asked(channels, query_rows) / 4, PageSpan(TABLE, USED)
    expected = attention(query, keys, values, span, rotated=rotated)
    given = moved((query, keys.stream, values.stream, span), device)
    assert supported(query_rows, *given[1:3], rope_tables=True)
    for precise, limit in ((False, OUTPUT), (True, PRECISE)):
        found = attend_pages(*given, precise=precise, rope_tables=moved(rope_tables, device), fold=moved(fold, device))
        near(found.mixed / found.mass, expected.output, limit)
        near(found.top + found.mass.log(), expected.normaliser, limit)


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_low_rank(device, rank):
    draw, streams = torch.Generator().manual_seed(5), []
    for number in (1, 2):
        pages = pages_of(Kind(4, "fixed"), (3, HEADS, PAGE, 128), number)
        coefficients = torch.randn(3, HEADS, PAGE, rank, generator=draw).half()
        basis = torch.randn(1, HEADS, rank, pages.tokens.shape[-1], generator=draw) / 16
        stream = replace(pages.stream, ranked=LowRankTerm(coefficients, basis))
        streams.append(Pages(stream, pages.tokens + coefficients.double() @ basis.double()))
    assert_same(device, asked(streams[0].tokens.shape[-1], 4), *streams)
