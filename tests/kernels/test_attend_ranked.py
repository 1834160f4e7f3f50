"""Tokens with a low-rank part besides their codes (GEAR, `LowRankTerm`), attended in the same pass; interpreted, against
float64."""

from dataclasses import replace

import pytest
import torch
from paged_attention import Kind, Pages, assert_attended, attention, pages_of
from tolerances import ATTENTION, FLOAT32_ATTENTION, ROUNDED_SCORES, SPLIT_SCORES

from calib.kernels.attend import operation, triton
from calib.kernels.attend.operation import Attended, LowRankTerm, PageSpan

# Padding lanes compute with infinities, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

HEADS, PAGE, COUNT = 2, 64, 3


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "room", lambda shape, like: torch.full(shape, torch.nan))


def ranked(pages: Pages, rank: int, seed: int, rows: int = 1, shared: bool = False, dtype=torch.float16) -> Pages:
    """The same pages with a low-rank part: coefficients of each head or of all (`shared`), a basis for each of `rows` batch rows.
    The returned tokens are those of row 0."""
    draw = torch.Generator().manual_seed(seed)
    count, heads, page, channels = pages.tokens.shape
    coefficients = torch.randn(count, 1 if shared else heads, page, rank, generator=draw).to(dtype)
    basis = torch.randn(rows, heads, rank, channels, generator=draw) / channels**0.5
    tokens = pages.tokens + coefficients.double() @ basis[0].double()
    return Pages(replace(pages.stream, ranked=LowRankTerm(coefficients, basis)), tokens)


def assert_same(query, keys, values, span, *, precise, softcap=None, constant=None, scored=False) -> Attended:
    assert triton.supports(query.shape[2], keys.stream, values.stream)
    found = operation.attend_pages(query, keys.stream, values.stream, span, constant, softcap, scored, precise)
    expected = attention(query, keys, values, span, constant, softcap)
    exact = keys.stream.bits == operation.EXACT
    of_scores = SPLIT_SCORES if precise or exact else ROUNDED_SCORES
    of_output = FLOAT32_ATTENTION if precise else ATTENTION[torch.float16]
    assert_attended(found, expected, values.tokens, of_scores, of_output)
    return found


@pytest.mark.full
@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize(
    ("keys", "values", "ranks", "channels"),
    [
        (Kind(2, "channel", 32), Kind(2, "token", 4), (4, 4), 32),
        (Kind(4, "token", 2), Kind(4, "token", 1), (1, 3), 64),
        (Kind(3, "fixed"), Kind(8, "fixed"), (5, 16), 40),
        (Kind(2, "channel", 64), Kind(1, "channel", 16), (0, 2), 32),
        (Kind(8, "fixed"), Kind(2, "token", 1), (16, 0), 32),
    ],
    ids=str,
)
def test_kernel(keys, values, ranks, channels, precise, monkeypatch):
    number = sum(ranks) + precise
    monkeypatch.setattr(triton, "_programs", lambda device: 1 + 8 * (number % 2))
    keys, values = (pages_of(kind, (COUNT, HEADS, PAGE, channels), seed) for seed, kind in enumerate((keys, values)))
    keys, values = (
        ranked(pages, rank, 5 + rank, shared=number % 2 == 0, dtype=torch.float32 if precise else torch.float16)
        if rank
        else pages
        for pages, rank in zip((keys, values), ranks, strict=True)
    )
    query = torch.randn(1, HEADS, (1, 3, 9)[number % 3], channels, generator=torch.Generator().manual_seed(3))
    span = PageSpan(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([100 + number], dtype=torch.int32))
    constant = torch.full((1, HEADS, query.shape[2], 1), -0.4)
    assert_same(
        query / channels**0.5, keys, values, span, precise=precise, constant=constant,
        softcap=4.0 if number % 2 else None, scored=number % 3 == 0,
    )  # fmt: skip


@pytest.mark.full
def test_every_row_has_vectors_of_its_own(monkeypatch):
    """Each batch row has its own basis. Coefficients of unused slots are NaN and do not change the result."""
    monkeypatch.setattr(triton, "_programs", lambda device: 64)
    shape = (COUNT, HEADS, PAGE, 32)
    keys, values = (ranked(pages_of(Kind(4, "fixed"), shape, seed), 3, 7 + seed, rows=2) for seed in (1, 2))
    for pages in (keys, values):
        pages.stream.ranked.coefficients[2, :, 10:] = torch.nan
    query = torch.randn(2, HEADS, 4, 32, generator=torch.Generator().manual_seed(3)) / 32**0.5
    table, used = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32), torch.tensor([74, 70], dtype=torch.int32)
    both = operation.attend_pages(query, keys.stream, values.stream, PageSpan(table, used), precise=True)
    for row in range(2):
        one = [
            Pages(
                replace(
                    pages.stream, ranked=replace(pages.stream.ranked, basis=pages.stream.ranked.basis[row : row + 1])
                ),
                plain.tokens
                + pages.stream.ranked.coefficients.nan_to_num().double() @ pages.stream.ranked.basis[row].double(),
            )
            for pages, plain in zip(
                (keys, values), (pages_of(Kind(4, "fixed"), shape, seed) for seed in (1, 2)), strict=True
            )
        ]
        own = slice(row, row + 1)
        alone = assert_same(query[own], *one, PageSpan(table[own], used[own]), precise=True)
        for name in ("top", "mass", "mixed"):
            torch.testing.assert_close(getattr(both, name)[own], getattr(alone, name), rtol=1e-5, atol=1e-5)


def test_more_vectors_than_are_served():
    few, many = (
        ranked(pages_of(Kind(4, "fixed"), (1, HEADS, PAGE, 32), 1), rank, 2).stream
        for rank in (triton.MOST_RANK, triton.MOST_RANK + 1)
    )
    assert triton.supports(1, few, few) and not triton.supports(1, few, many) and not triton.supports(1, many, few)


def test_coefficients_between_words_of_four_bytes():
    """An even number of float16 coefficients is read in pairs, as 4-byte words: at an odd offset that address is misaligned."""
    pages = pages_of(Kind(4, "fixed"), (1, HEADS, PAGE, 32), 1)
    for rank, dtype, served in ((4, torch.float16, False), (3, torch.float16, True), (4, torch.float32, True)):
        stream = ranked(pages, rank, 2, dtype=dtype).stream
        shape = stream.ranked.coefficients.shape
        moved = torch.zeros(1 + shape.numel(), dtype=dtype)[1:].view(shape)
        other = replace(stream, ranked=replace(stream.ranked, coefficients=moved))
        assert triton.supports(1, stream, stream)
        assert triton.supports(1, other, stream) == triton.supports(1, stream, other) == served
