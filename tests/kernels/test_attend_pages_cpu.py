"""A tier's pages attended by compiled C in one pass, and exact tokens attended and merged with them, against float64. Neither the
number of threads nor the other batch rows change a bit."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from mixed_words import NARROW, PAGE, WIDE, Words, stored
from paged_attention import Kind, Pages, assert_attended, attention, pages_of
from predicted_values import predicted_values
from rotated_keys import HEADS, keys_of, make_rope_tables, tables
from sized_tokens import sized, sized_keys, sizes_of
from tolerances import FLOAT32_ATTENTION

from calib.kernels.attend import exact_cpu, operation, pages_cpu, triton
from calib.kernels.attend.operation import Attended, CodeFold, ExactGroup, ExactTokens, PageSpan, RopeTables
from calib.kernels.trellis.reference import trellis_levels
from calib.runtime.rotation import Rotation

pytestmark = [
    pytest.mark.arithmetic,
    pytest.mark.skipif(
        not any(map(shutil.which, ("cc", "gcc", "clang"))) and "CC" not in os.environ, reason="no C compiler"
    ),
]

SCORES = 2e-6  # of the size of a score's terms: float32 sums of hundreds
KINDS = [
    Kind(4, "token", 1), Kind(2, "token", 2), Kind(3, "token", 1), Kind(2, "channel", 32), Kind(4, "channel", 64), Kind(8, "fixed"),
    Kind(1, "fixed"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.delenv("CALIB_KERNELS", raising=False)


def laid_out(pages: Pages) -> Pages:
    """The same pages in a CPU pool's memory layout: the tokens of one channel or word are contiguous."""
    stream = pages.stream
    parts = {
        name: getattr(stream, name).permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
        for name in ("pages", "parameters", "scales", "sizes")
        if getattr(stream, name) is not None
    }
    return Pages(replace(stream, **parts), pages.tokens)


def drawn(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def span_of(table, used) -> PageSpan:
    return PageSpan(torch.tensor(table, dtype=torch.int32), torch.tensor(used, dtype=torch.int32))


def attended(query, keys: Pages, values: Pages, span, constant=None, softcap=None, **options) -> Attended:
    turned = options.get("rope_tables") is not None
    assert operation.supported(query.shape[2], keys.stream, values.stream, turned, first_slots=True)
    return operation.attend_pages(query, keys.stream, values.stream, span, constant, softcap, **options)


def check(query, keys, values, span, constant=None, softcap=None) -> Attended:
    keys, values = laid_out(keys), laid_out(values)
    found = attended(query, keys, values, span, constant, softcap)
    expected = attention(query, keys, values, span, constant, softcap)
    assert_attended(found, expected, values.tokens, SCORES, FLOAT32_ATTENTION)
    normaliser = found.top.double() + found.mass.double().log()
    seen = expected.normaliser > -torch.inf
    assert (normaliser - expected.normaliser)[seen].abs().max() <= SCORES * expected.terms[seen].max() + 1e-6
    return found


@pytest.mark.parametrize("query_rows", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_codes_of_any_parameters(kind, query_rows):
    """Three rows, of 720, 257 and 0 tokens, with page numbers in any order: the second has one token on its last page."""
    shape = (9, 3, 128, 64)
    keys, values = pages_of(kind, shape, 1), pages_of(kind, shape, 2)
    query = drawn(3, 3, query_rows, 64) / 4
    span = span_of([[8, 0, 3, 7, 1, 5], [2, 2, 2, 0, 0, 0], [4, 0, 0, 0, 0, 0]], [720, 257, 0])
    check(query, keys, values, span, constant=drawn(3, 3, query_rows, 1, seed=4))


@pytest.mark.parametrize("page", [8, 40, 60, 512])
def test_pages_of_any_size_and_scales_of_their_channels(page):
    """Keys have scales per channel and page, too, which the Triton kernel does not support."""
    shape = (7, 2, page, 36)
    keys, values = (pages_of(Kind(4, "token"), shape, seed, shared=seed == 2, scaled=True) for seed in (1, 2))
    span = span_of([[5, 1, 3, 0, 6]], [4 * page + 3])
    check(drawn(1, 2, 4, 36) / 3, keys, values, span, softcap=4.0)


@pytest.mark.parametrize("keys", [NARROW, Kind(2, "channel", 32)], ids=str)
@pytest.mark.parametrize("values", [WIDE, NARROW], ids=str)
def test_words_of_all_heads_side_by_side(keys, values):
    keys, values = stored(keys, 1), stored(values, 2)
    query = drawn(1, HEADS, 5, keys.tokens.shape[-1]) * (keys.tokens.abs().amax((0, 2)) > 0)[:, None] / 3
    check(query, keys, values, span_of([[2, 0]], [117]), constant=torch.full((1, HEADS, 5, 1), 0.7))


@pytest.mark.parametrize("query_rows", [1, 3, 7])
@pytest.mark.parametrize(
    ("own", "channels", "rotated"),
    [
        (NARROW, 64, 64),
        (WIDE, 48, 20),  # partial RoPE, in pairs that no vector divides
        (Words((4, 3, 3, 2, 2, 1, 1), (2, 18, 6)), 30, 30),
        (Words((1,) * 16, (2, 1, 0)), 128, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_sizes", [None, "words", "bytes"])
def test_keys_before_rope(own, channels, rotated, query_rows, has_sizes):
    """Keys are rebuilt from codes of components and rotated; where tokens have sizes, the keys' codes also predict values."""
    rotation = Rotation(10000.0 ** -torch.linspace(0, 1, rotated // 2, dtype=torch.float64))
    (keys, rope_tables), values = keys_of(own, channels, 1), stored(WIDE, 2)
    sizes, of_values = (sizes_of(HEADS, PAGE, seed, 9, has_sizes == "bytes") for seed in (7, 8))
    if has_sizes:
        keys, values = sized_keys(keys, rope_tables, sizes), sized(values, of_values)
    fold, asked_keys, asked_values, first = None, laid_out(keys), laid_out(values), 1004
    if has_sizes:
        values, fold = predicted_values(values, WIDE, of_values, keys, own, sizes)
    rope_tables = replace(rope_tables, **tables(rotation, first, 10 * PAGE))
    query = drawn(2, HEADS, query_rows, channels) / (4 * channels**0.5)
    span = span_of([[2, 0, 1, 1, 2, 0, 2, 1, 0, 0], [1, 2, 0, 0, 0, 0, 0, 0, 0, 0]], [601, 65])
    found = attended(query, asked_keys, asked_values, span, rope_tables=rope_tables, fold=fold)
    asked = query, keys, values, span, None, None, make_rope_tables(rotation, first + torch.arange(10 * PAGE))
    assert_attended(found, attention(*asked), values.tokens, SCORES, FLOAT32_ATTENTION)


@pytest.mark.parametrize("has_sizes", [False, True])
@pytest.mark.parametrize(
    "own", [Words((3, 4, 2, 6, 1), (3, 0, 5)), Words((8, 8), (7, 16, 2)), Words((1,) * 16, (4, 1, 2))], ids=str
)
def test_trellis_coded_levels(own, has_sizes):
    """Keys before RoPE and values whose words hold trellis-coded levels: a level also depends on the words before its own."""
    rotation, channels, first = Rotation(10000.0 ** -torch.linspace(0, 1, 16, dtype=torch.float64)), 48, 1004
    draw, most = torch.Generator().manual_seed(1), max(own.counts)
    shape, wide = (3, 1, PAGE, sum(own.counts)), len(own.widths) * most
    words = [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=draw) for _ in range(2)]
    numbers = [trellis_levels(part.mT, own.widths, own.counts).mT.double() * own.own() for part in words]
    last = torch.tensor([2.0 ** (width + 1) - 1 for width in own.widths]).repeat_interleave(most)
    axes = (torch.randn(HEADS, wide, channels, generator=draw) / last[:, None] * own.own().mT).half()
    size, mean = torch.tensor([0.5, 1, 4]).view(3, 1, 1), torch.randn(HEADS, 1, channels, generator=draw)
    tokens = mean.double() + size.double() * ((numbers[0] - (last / 2).double() * own.own()) @ axes.double())
    streams = [operation.PackedStream(own.widths, part, wide, counts=own.counts, trellis=True) for part in words]
    steps, least = (
        torch.rand(HEADS, 1, wide, generator=draw) / last,
        torch.randn(HEADS, 1, wide, generator=draw) * own.own(),
    )
    streams[1] = replace(streams[1], fixed=(steps, least))
    keys, values = Pages(streams[0], tokens), Pages(streams[1], numbers[1] * steps.double() + least.double())
    rope_tables = RopeTables(axes, size, mean, **tables(rotation, first, 10 * PAGE))
    if has_sizes:
        keys = sized_keys(keys, rope_tables, sizes_of(HEADS, PAGE, 7, 9))
        values = sized(values, sizes_of(HEADS, PAGE, 8, 9))
    keys, values = laid_out(keys), laid_out(values)
    query = drawn(2, HEADS, 3, channels) / (4 * channels**0.5)
    span = span_of([[2, 0, 1, 1, 2, 0, 2, 1, 0, 0], [1, 2, 0, 0, 0, 0, 0, 0, 0, 0]], [601, 65])
    assert not triton.supports(3, keys.stream, values.stream, rope_tables=True)
    found = attended(query, keys, values, span, rope_tables=rope_tables)
    turned = make_rope_tables(rotation, first + torch.arange(10 * PAGE))
    expected = attention(query, keys, values, span, None, None, turned)
    assert_attended(found, expected, values.tokens, SCORES, FLOAT32_ATTENTION)


@pytest.mark.parametrize("has_sizes", [False, True])
def test_a_mixture_of_components_is_brought_to_channels(has_sizes):
    keys, values, sizes = pages_of(Kind(4, "token"), (3, HEADS, PAGE, 32), 1), stored(WIDE, 2), sizes_of(HEADS, PAGE, 8)
    parts, span, query = [keys], span_of([[2, 0]], [117]), drawn(1, HEADS, 3, 32) / 3
    axes, size = drawn(HEADS, values.stream.channels, 24, seed=5).half(), torch.tensor([0.5, 1, 4]).view(3, 1, 1)
    origin, mean = drawn(HEADS, 1, 24, seed=6), drawn(HEADS, 1, 24, seed=7)
    codes = (values.tokens - values.stream.fixed[1]) / values.stream.fixed[0]
    moved, offset = size.double() * (codes @ axes.double()), origin.double()
    tokens = moved + offset
    if has_sizes:
        values = Pages(replace(values.stream, sizes=sizes.words), values.tokens)
        tokens = mean.double() + sizes.sizes * (moved + offset - mean)
    parts = laid_out(keys), laid_out(values)
    found = attended(query, *parts, span, fold=CodeFold(axes, size, origin, mean if has_sizes else None))
    assert_attended(
        found, attention(query, keys, Pages(values.stream, tokens), span), tokens, SCORES, FLOAT32_ATTENTION
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scores_of_keys_ahead(kind):
    """`ahead`: scores of 170 keys behind the 100 attended ones, which reach into the third page; attention is unchanged."""
    shape, query = (5, 2, 128, 48), drawn(2, 2, 3, 48) / 4
    keys, values = laid_out(pages_of(kind, shape, 1)), laid_out(pages_of(kind, shape, 2))
    span, constant = span_of([[3, 0, 4], [1, 2, 0]], [100, 100]), drawn(2, 2, 3, 1, seed=4)
    found = attended(query, keys, values, span, constant, ahead=170)
    everything = attention(query, keys, values, replace(span, used=span.used + 170), constant)
    wrong = (found.ahead.double() - everything.scores[..., 100:270]) / everything.terms
    assert found.ahead.shape == (2, 2, 3, 170) and wrong.abs().max() <= SCORES
    assert_attended(found, attention(query, keys, values, span, constant), values.tokens, SCORES, FLOAT32_ATTENTION)


def test_a_row_has_no_scores_ahead_behind_the_last_page():
    """`ahead` is one number for the batch. A row whose page table ends sooner has scores only up to there."""
    kind, shape, query = Kind(2, "channel", 32), (5, 2, 128, 48), drawn(2, 2, 3, 48) / 4
    keys, values = laid_out(pages_of(kind, shape, 1)), laid_out(pages_of(kind, shape, 2))
    wild = 10**9  # no page
    span = span_of([[3, 0, wild], [1, 2, wild]], [250, 0])
    span = replace(span, table=span.table[:, :2])
    found = attended(query, keys, values, span, ahead=170).ahead
    for row, count in ((0, 6), (1, 170)):
        own = PageSpan(span.table[row : row + 1], span.used[row : row + 1])
        alone = attended(query[row : row + 1], keys, values, own, ahead=count).ahead
        assert torch.equal(found[row, ..., :count], alone[0])


def test_an_index_says_which_exact_tokens_have_scores():
    rows, heads, query_rows, dim, slots = 2, 2, 3, 20, 9
    query, (keys, values) = drawn(rows, heads, query_rows, dim) / 4, drawn(2, rows, heads, slots, dim, seed=1)
    scores = drawn(rows, heads, query_rows, 5, seed=2)
    index = torch.tensor([[0, 4, -1, 2, -1, -1, 1, 3, -1], [-1] * 8 + [2]], dtype=torch.int32)
    chosen = index[:, None, None].expand(-1, heads, query_rows, -1)
    met = torch.where(chosen < 0, query @ keys.mT, scores.gather(-1, chosen.clamp(min=0).long()))
    expected = met.double().softmax(-1) @ values.double()
    tokens = ExactTokens((ExactGroup(values, keys, scores, index),))
    assert operation.exact_supported(query, tokens)
    found = operation.attend_exact(query, tokens, [])
    assert (found.output.double() - expected).abs().max() <= FLOAT32_ATTENTION * expected.abs().max()


@pytest.mark.parametrize("kind", [Kind(4, "token"), Kind(2, "channel", 32)], ids=str)
def test_neither_threads_nor_other_rows_change_a_bit(kind):
    shape, query = (12, 2, 128, 64), drawn(3, 2, 3, 64) / 4
    keys, values = laid_out(pages_of(kind, shape, 1)), laid_out(pages_of(kind, shape, 2))
    table = torch.randint(0, 12, (3, 40), generator=torch.Generator().manual_seed(1)).tolist()
    span, before, found = span_of(table, [5000, 700, 1]), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(attended(query, keys, values, span))
    finally:
        torch.set_num_threads(before)
    for row in range(3):
        pages = -(-span.used[row] // 128)
        alone = attended(
            query[row : row + 1], keys, values, PageSpan(span.table[row : row + 1, :pages], span.used[row : row + 1])
        )
        for name in ("top", "mass", "mixed"):
            assert all(torch.equal(getattr(one, name)[row], getattr(alone, name)[0]) for one in found)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("query_rows", "key_dim", "value_dim", "softcap"), [(1, 64, 64, None), (3, 20, 36, 5.0), (8, 128, 128, None)]
)
def test_exact_tokens_are_joined_with_other_parts(dtype, query_rows, key_dim, value_dim, softcap):
    """Slots of a window (slices of longer tensors), tokens with given scores, and new tokens; some are masked. One of the other
    parts has no token."""
    rows, heads, counts, draw = 2, 3, (30, 7, 1), iter(range(20))
    query = drawn(rows, heads, query_rows, key_dim, seed=next(draw)) / 4
    keys = [drawn(rows, heads, 40, key_dim, seed=next(draw)).to(dtype)[:, :, 2 : 2 + n] for n in counts]
    values = [drawn(rows, heads, 40, value_dim, seed=next(draw)).to(dtype)[:, :, 3 : 3 + n] for n in counts]
    scores = [query.double() @ part.double().mT for part in keys]
    groups = [
        ExactGroup(values[i], None if i == 1 else keys[i], scores[1].float() if i == 1 else None) for i in range(3)
    ]
    by_head = heads if softcap is None else 1
    hidden = torch.rand(rows, by_head, 1, sum(counts), generator=torch.Generator().manual_seed(1)) < 0.3
    hidden[..., -1] = False
    others = [drawn(rows, heads, query_rows, n, seed=next(draw)) for n in (50, 1)]
    mixing = [drawn(rows, heads, n, value_dim, seed=next(draw)) for n in (50, 1)]
    parts = []
    for own, mixed in zip(others, mixing, strict=True):
        top = own.amax(-1, keepdim=True)
        weights = (own - top).exp()
        parts.append(Attended(top, weights.sum(-1, keepdim=True), weights @ mixed, None))
    parts.append(Attended(torch.full_like(top, -1e38), torch.zeros_like(top), torch.zeros_like(parts[0].mixed), None))
    tokens = ExactTokens(tuple(groups), hidden)
    assert operation.exact_supported(query, tokens)
    told = operation.attend_exact(query, tokens, parts, softcap, told=True)
    found = told.output
    met = torch.cat(scores, -1)
    met = (met if softcap is None else softcap * (met / softcap).tanh()).masked_fill(hidden, -torch.inf)
    every = torch.cat([*(own.double() for own in others), met], -1)
    weights, normaliser = every.softmax(-1), every.logsumexp(-1, keepdim=True)
    assert found.dtype == torch.float32
    for own, exact in ((told.normaliser, normaliser), (told.scores, met)):
        own, exact = own.double().nan_to_num(neginf=0), exact.nan_to_num(neginf=0)
        assert (own - exact).abs().max() <= FLOAT32_ATTENTION * exact.abs().max()
    assert torch.equal(operation.attend_exact(query, tokens, parts, softcap).output, found)
    expected = weights @ torch.cat([*(own.double() for own in mixing), *(own.double() for own in values)], 2)
    assert (found.double() - expected).abs().max() <= FLOAT32_ATTENTION * expected.abs().max()


def test_what_is_not_served():
    """Spans that may have masks or return scores; more query rows or channels than C's limits; exact tokens in pages; parameters in
    float32; other memory layouts; groups of 4 tokens; pages of 4 tokens."""
    kind, shape = Kind(4, "token"), (2, 2, 64, 32)
    keys, values = laid_out(pages_of(kind, shape, 1)).stream, laid_out(pages_of(kind, shape, 2)).stream
    assert operation.supported(8, keys, values, first_slots=True)
    assert not operation.supported(8, keys, values)
    assert not operation.supported(9, keys, values, first_slots=True)
    assert not operation.supported(1, keys, values, rope_tables=True, first_slots=True)
    for other in (
        pages_of(kind, shape, 1).stream,
        laid_out(pages_of(Kind("float32"), shape, 1)).stream,
        replace(keys, parameters=keys.parameters.float()),
        laid_out(pages_of(kind, (2, 2, 64, 516), 1)).stream,
        laid_out(pages_of(Kind(4, "channel", 4), shape, 1)).stream,
        laid_out(pages_of(kind, (2, 2, 4, 32), 1)).stream,
    ):
        assert not pages_cpu.supports(1, other, other)
    query = torch.zeros(1, 2, 1, 32)
    new = ExactTokens((ExactGroup(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32)),))
    assert exact_cpu.supports(query, new)
    assert not exact_cpu.supports(query, replace(new, hidden=torch.zeros(1, 1, 2, 1, dtype=torch.bool)))
    assert not exact_cpu.supports(torch.zeros(1, 2, 9, 32), new)


def test_plain_torch_can_be_forced(monkeypatch):
    kind, shape = Kind(4, "token"), (2, 2, 64, 32)
    keys, values = laid_out(pages_of(kind, shape, 1)).stream, laid_out(pages_of(kind, shape, 2)).stream
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    assert not operation.supported(1, keys, values, first_slots=True)
