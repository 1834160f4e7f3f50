"""Words with fields of different widths, the words of all heads in one row: attention on codes by plain torch and by the
interpreted kernel, against float64."""

import pytest
import torch
from mixed_words import NARROW, PAGE, WIDE, Words, stored
from paged_attention import Kind, Pages, assert_attended, attention, of_rows
from tolerances import ATTENTION, FLOAT32_ATTENTION, ROUNDED_SCORES, SPLIT_SCORES

from calib.kernels.attend import operation, signatures, triton
from calib.kernels.attend.operation import PackedStream, PageSpan
from calib.kernels.attend.reference import RunningSoftmax, code_mix, code_scores
from calib.kernels.pack.heads import join_heads, spread_heads
from calib.kernels.pack.reference import pack

# Padding lanes compute with infinities, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "room", lambda shape, like: torch.full(shape, torch.nan))


CASES = [
    (NARROW, WIDE),
    (WIDE, NARROW),
    (Words((1,) * 16, (2, 1, 3)), Words((8, 7, 1), (8, 24, 16))),
    (Words((4, 3, 3, 2, 2, 1, 1), (2, 18, 6)), Words((3,), (1, 1, 1))),
    (Words((2,) * 8, (7, 7, 7)), Kind(5, "token")),
    (Kind(6, "channel", 32), Words((5, 1), (4, 4, 1))),
    (Words((4, 4, 4, 4), (0, 9, 0)), Kind("float16")),
    (Kind("float32"), Words((8, 8), (4, 12, 8))),
    (Kind(7, "fixed"), NARROW),
    (Words((6, 4, 3, 2, 1), (3, 0, 5), trellis=True), Words((8, 7, 1), (8, 24, 16), trellis=True)),
    (Words((2,) * 8, (7, 7, 7), trellis=True), Words((1,) * 16, (2, 1, 3), trellis=True)),
]


def asked(keys: Pages, rows: int = 1, query_rows: int = 2) -> torch.Tensor:
    """Queries that are 0 where a head has no component."""
    _, heads, _, channels = keys.tokens.shape
    query = torch.randn(rows, heads, query_rows, channels, generator=torch.Generator().manual_seed(3))
    own = keys.tokens.abs().amax((0, 2)) > 0
    return query * own[:, None] * (2 / channels**0.5)


def tolerances(keys: Pages, values: Pages, precise: bool) -> tuple[float, float]:
    scores, output = (SPLIT_SCORES, FLOAT32_ATTENTION) if precise else (ROUNDED_SCORES, ATTENTION[torch.float16])
    if keys.stream.bits == operation.EXACT:
        scores = FLOAT32_ATTENTION if keys.stream.pages.dtype == torch.float32 else SPLIT_SCORES
    return scores, output if values.stream.bits != operation.EXACT else ATTENTION[values.stream.pages.dtype]


def assert_same(query, keys, values, span, *, constant=None, softcap=None, scored=False, precise=True):
    """Assert that the kernel's attention is that of float64, and 0 for components that a head does not have."""
    assert triton.supports(query.shape[2], keys.stream, values.stream)
    found = operation.attend_pages(query, keys.stream, values.stream, span, constant, softcap, scored, precise)
    expected = attention(query, keys, values, span, constant, softcap)
    assert_attended(found, expected, values.tokens, *tolerances(keys, values, precise))


@pytest.mark.full
@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize(("keys", "values"), CASES, ids=str)
def test_kernel(keys, values, precise, monkeypatch):
    number = CASES.index((keys, values)) + precise
    monkeypatch.setattr(triton, "_programs", lambda device: 1 + 8 * (number % 3 == 0))
    keys, values = stored(keys, 1), stored(values, 2)
    query = asked(keys, query_rows=(1, 3, 9)[number % 3])
    span = PageSpan(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([65 + 6 * number], dtype=torch.int32))
    # The only score of a head without words.
    constant = torch.full((1, 3, query.shape[2], 1), 0.7)
    assert_same(query, keys, values, span, constant=constant, precise=precise, scored=number % 2 == 0)


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 64])
def test_kernel_with_all_that_a_stretch_says(programs, monkeypatch):
    """Rows of different lengths, masked slots, positions, a sliding window for two query columns, a constant and a soft cap."""
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    keys, values = stored(NARROW, 1), stored(Words((4, 3, 3, 2, 2, 1, 1), (2, 18, 6)), 2)
    draw = torch.Generator().manual_seed(4)
    table = torch.tensor([[2, 1], [0, 1], [0, 0]], dtype=torch.int32)
    span = PageSpan(
        table,
        torch.tensor([128, 70, 0], dtype=torch.int32),
        hidden=torch.rand(3, 3, 128, generator=draw) < 0.3,
        positions=torch.arange(3 * 3 * PAGE, dtype=torch.int32).mul(89).remainder(211).view(3, 3, PAGE, 1),
        back=torch.tensor([[-1, 40], [500, 63], [0, 0]], dtype=torch.int32),
    )
    constant = torch.randn(3, 3, 4, 1, generator=draw)
    assert_same(asked(keys, 3, 4), keys, values, span, constant=constant, softcap=3.0, scored=programs == 1)


@pytest.mark.parametrize("own", [NARROW, WIDE, CASES[2][1], CASES[3][0]], ids=str)
def test_plain_torch(own):
    """Attention in plain torch, tile by tile: tokens are the last axis, and `spread_heads` gives each head its own rows of
    words."""
    keys, values = stored(own, 1), stored(own, 2)
    table = torch.tensor([[2, 1], [0, 1]], dtype=torch.int32)
    query = asked(keys, rows=2, query_rows=4)
    whole = torch.full((2,), 2 * PAGE, dtype=torch.int32)
    expected, softmax = attention(query, keys, values, PageSpan(table, whole)), RunningSoftmax()
    (scale, zero), (out_scale, out_zero) = keys.stream.fixed, values.stream.fixed
    for number in range(2):
        words = [spread_heads(of_rows(part.stream.pages, table[:, [number]]).mT, own.counts) for part in (keys, values)]
        assert words[0].shape == (2, len(own.counts), max(own.counts), PAGE)
        scores = code_scores(query * scale, words[0], own.widths) + (query * zero).sum(-1, keepdim=True)
        weights = softmax.weights(scores)
        mixed = code_mix(weights, words[1], own.widths, values.stream.channels)
        assert mixed.isfinite().all()  # also for components that a head does not have
        softmax.add((mixed * out_scale + weights.sum(-1, keepdim=True) * out_zero) * own.own())
        torch.testing.assert_close(
            scores.double(), expected.scores[..., number * PAGE : (number + 1) * PAGE], rtol=0, atol=FLOAT32_ATTENTION
        )
    assert (softmax.output().double() - expected.output).abs().amax() < FLOAT32_ATTENTION * values.tokens.abs().amax()


def test_a_token_without_words():
    words = spread_heads(join_heads(pack(torch.zeros(1, 2, 5, 0), (7, 5)), (0, 0)).mT, (0, 0))
    assert torch.equal(code_scores(torch.ones(1, 2, 3, 0), words, (7, 5)), torch.zeros(1, 2, 3, 5))
    assert code_mix(torch.ones(1, 2, 3, 5), words, (7, 5), 0).shape == (1, 2, 3, 0)


@pytest.mark.parametrize(
    ("counts", "piece", "full"),
    [
        ((3, 0, 5), 1, False),
        ((6, 2), 2, False),
        ((12, 0), 4, False),
        ((16, 16), 8, True),
        ((16, 0), 8, False),
        ((24,), 8, False),
    ],
)
def test_loads_are_as_wide_as_all_heads_allow(counts, piece, full):
    stream = signatures.stream_of((7, 5, 4), channels=3 * max(counts), counts=counts)
    found = signatures.specialisation(stream, stream).constants
    assert [found[name] for name in ("KEY_PIECE", "KEY_FULL", "VALUE_PIECE", "VALUE_FULL")] == [piece, full] * 2


def test_heads_side_by_side_have_no_parameters_in_pages():
    keys = stored(NARROW, 1).stream
    assert triton.supports(2, keys, keys)
    nothing = PackedStream(keys.bits, keys.pages[..., :0], 0, counts=(0, 0, 0))
    assert not triton.supports(2, nothing, keys) and not triton.supports(2, keys, nothing)
    numbers = torch.zeros(3, 1, PAGE, 2, dtype=torch.float16)
    parameters = PackedStream(keys.bits, keys.pages, keys.channels, numbers, counts=keys.counts)
    assert not triton.supports(2, parameters, keys) and not triton.supports(2, keys, parameters)
