"""Tokens with a size (a factor of a token's components), and values that are predicted from the codes of their keys, attended in
one pass: interpreted, against float64."""

from dataclasses import replace

import pytest
import torch
import triton as compiler
import triton.language as tl
from mixed_words import NARROW, PAGE, WIDE, Words, stored
from paged_attention import Kind, Pages, assert_attended, attention, of_rows, pages_of
from predicted_values import predicted_values
from rotated_keys import HEADS, keys_of, make_rope_tables, tables
from sized_tokens import sized, sized_keys, sizes_of
from tolerances import ATTENTION, FLOAT32_ATTENTION, ROUNDED_SCORES, SPLIT_SCORES

from calib.kernels.attend import operation, triton
from calib.kernels.attend.loads import token_sizes
from calib.kernels.attend.operation import SIZE_BITS, Attended, CodeFold, LowRankTerm, PageSpan
from calib.kernels.pack.reference import unpack
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec import MixedQuant, Sized

# Padding lanes compute with infinities, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

MIXED = Words((4, 3, 3, 2, 2, 1, 1), (2, 18, 6))


def coded(own: Words) -> Words:
    """The same words with trellis-coded levels."""
    return replace(own, trellis=True)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed. One program reads all pages of a head, unless a
    test sets more."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "room", lambda shape, like: torch.full(shape, torch.nan))
    monkeypatch.setattr(triton, "_programs", lambda device: 1)


def tolerances(precise: bool, turned: bool) -> tuple[float, float]:
    """Tolerances of scores and outputs, the same as without sizes (`test_attend_rotated.py`)."""
    if turned:
        return (4 * SPLIT_SCORES, FLOAT32_ATTENTION) if precise else (2 * ROUNDED_SCORES, ATTENTION[torch.float16])
    return (SPLIT_SCORES, FLOAT32_ATTENTION) if precise else (ROUNDED_SCORES, ATTENTION[torch.float16])


class Turned:
    """Keys before RoPE with sizes and values with sizes, attended by the kernel and in float64."""

    def __init__(
        self, own: Words, values: Words, channels: int, rotated: int, largest: int = 9, in_bytes: bool = False
    ) -> None:
        self.own, self.sizes = own, sizes_of(HEADS, PAGE, 7, largest, in_bytes)
        self.rotation = Rotation(10000.0 ** -torch.linspace(0, 1, rotated // 2, dtype=torch.float64))
        plain, self.tables = keys_of(own, channels, 1)
        self.keys = sized_keys(plain, self.tables, self.sizes)
        self.of_values, own_sizes = values, sizes_of(HEADS, PAGE, 8, largest, in_bytes)
        self.values, self.value_sizes = sized(stored(values, 2), own_sizes), own_sizes
        self.channels = channels

    def predicted(self, beside: torch.Tensor | float = 0) -> tuple[Pages, CodeFold]:
        """The values in channels, including their prediction from the keys, and the fold that computes them."""
        return predicted_values(self.values, self.of_values, self.value_sizes, self.keys, self.own, self.sizes, beside)

    def query(self, rows: int, query_rows: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(3)
        return torch.randn(rows, HEADS, query_rows, self.channels, generator=draw) / (2 * self.channels**0.5)

    def check(
        self, query, span: PageSpan, first: int, last: int, *, precise=True, mixes=True, beside=0.0, **options
    ) -> Attended:
        """Compare the kernel with float64. Positions are the span's, or count the slots from `first` on; all are below `last`.
        `mixes`: values include their prediction from the keys."""
        rope_tables = replace(self.tables, **tables(self.rotation, first, last - first))
        positions = first + torch.arange(span.table.shape[1] * PAGE)
        if span.positions is not None:
            positions = of_rows(span.positions, span.table)[..., 0]
        streams = self.keys.stream, self.values.stream
        values, fold = self.predicted(beside) if mixes else (self.values, None)
        assert triton.supports(query.shape[2], *streams, rope_tables=True)
        softcap = options.get("softcap")
        found = operation.attend_pages(
            query, *streams, span, None, softcap, options.get("scored", False), precise, rope_tables, fold
        )
        asked = query, self.keys, values, span, None, softcap, make_rope_tables(self.rotation, positions)
        assert_attended(found, attention(*asked), values.tokens, *tolerances(precise, True))
        return found


@compiler.jit
def _sizes_of_tokens(SIZES, OUT, head, WORDS: tl.constexpr, PAGE: tl.constexpr):
    slot = tl.arange(0, PAGE)
    tl.store(OUT + slot, token_sizes(SIZES, slot * WORDS + head % WORDS, head, slot < PAGE, WORDS, False))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 12])
def test_sizes_are_those_of_the_codec_bit_for_bit(heads):
    """Every 4-bit number i in every head, where the heads of a token take a byte or one, two or three words. Its size is
    2^((i - 5) / 2), rounded to float32."""
    numbers = (torch.arange(16)[None] + torch.arange(heads)[:, None]) % 16
    codec = Sized(MixedQuant((4,) * 4, (1,) * heads), torch.ones(heads, 1, 4))
    components = (2.0 ** ((numbers - 5) / 2))[None, ..., None].expand(1, heads, 16, 4) / 2
    block = codec.encode(components)
    assert torch.equal(unpack(block["sizes"][0, 0], SIZE_BITS, heads).T.long(), numbers)
    for head in range(heads):
        found = torch.full((16,), torch.nan)
        _sizes_of_tokens[(1,)](block["sizes"], found, head, WORDS=block["sizes"].shape[-1], PAGE=16)
        assert torch.equal(found, (2.0 ** ((numbers[head].double() - 5) / 2)).float())
        assert torch.equal(found, codec.sizes({"sizes": block["sizes"].mT})[0, head, 0])


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (NARROW, WIDE),
        (WIDE, MIXED),
        (Kind(2, "channel", 32), NARROW),
        (Kind("float16"), Kind(4, "fixed")),
        (coded(NARROW), coded(MIXED)),
    ],
    ids=str,
)
@pytest.mark.parametrize("query_rows", [2, 9])
def test_values(keys, values, query_rows, precise, monkeypatch):
    """Values with sizes beside keys of any kind; with two query rows several parts are merged."""
    monkeypatch.setattr(triton, "_programs", lambda device: 64 if query_rows == 2 else 1)
    keys, values = stored(keys, 1), sized(stored(values, 2), sizes_of(HEADS, PAGE, 6))
    query = torch.randn(1, HEADS, query_rows, keys.tokens.shape[-1], generator=torch.Generator().manual_seed(3))
    query = query * (keys.tokens.abs().amax((0, 2)) > 0)[:, None] * (2 / query.shape[-1] ** 0.5)
    span = PageSpan(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([117], dtype=torch.int32))
    constant = torch.full((1, HEADS, query_rows, 1), 0.7)
    assert triton.supports(query_rows, keys.stream, values.stream)
    found = operation.attend_pages(query, keys.stream, values.stream, span, constant, precise=precise)
    of_scores, of_output = tolerances(precise, False)
    assert_attended(found, attention(query, keys, values, span, constant), values.tokens, of_scores, of_output)


@pytest.mark.full
def test_values_with_coefficients_and_predictions_besides(monkeypatch):
    """The mixtures have all kinds of columns, in several parts: components, sizes, low-rank coefficients and the keys' codes."""
    monkeypatch.setattr(triton, "_programs", lambda device: 64)
    turned, draw = Turned(NARROW, WIDE, 32, 32), torch.Generator().manual_seed(9)
    values = turned.values
    coefficients = torch.randn(3, HEADS, PAGE, 3, generator=draw).half()
    basis = torch.randn(1, HEADS, 3, values.tokens.shape[-1], generator=draw)
    ranked = replace(values.stream, ranked=LowRankTerm(coefficients, basis))
    beside = coefficients.double() @ basis[0].double()
    turned.values = Pages(ranked, values.tokens + beside)
    span = PageSpan(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([117], dtype=torch.int32))
    turned.check(turned.query(1, 3), span, 0, 2 * PAGE, beside=beside)


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("mixes", [True, False], ids=["predicted", "alone"])
@pytest.mark.parametrize(
    ("own", "values", "channels", "rotated", "query_rows"),
    [
        (NARROW, WIDE, 32, 32, 1),
        (coded(NARROW), coded(MIXED), 32, 32, 1),
        (coded(WIDE), coded(NARROW), 64, 16, 16),
        (NARROW, MIXED, 64, 16, 8),  # partial RoPE
        (WIDE, NARROW, 48, 48, 11),  # half of the rotated channels is no power of two
        (MIXED, NARROW, 24, 20, 16),
        (Words((8, 8), (4, 12, 0)), WIDE, 64, 64, 1),
        (Words((1,) * 16, (2, 1, 3)), NARROW, 40, 40, 65),
    ],
    ids=str,
)
def test_keys(own, values, channels, rotated, query_rows, mixes, precise, monkeypatch):
    """Blocks of 8 and of 16 query rows, and several blocks of 16; heads with different numbers of words, one with none; with one
    query row several parts are merged; sizes in bytes and in words."""
    monkeypatch.setattr(triton, "_programs", lambda device: 9 if query_rows == 1 else 1)
    turned = Turned(own, values, channels, rotated, in_bytes=query_rows % 2 == 0)
    span = PageSpan(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([117], dtype=torch.int32))
    turned.check(
        turned.query(1, query_rows), span, 1004, 1004 + 2 * PAGE, precise=precise, mixes=mixes, scored=query_rows == 8
    )


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 64])
def test_keys_with_all_that_a_span_says(programs, monkeypatch):
    """Rows of different lengths, one of them empty, positions in any order, masked slots, a bias, a sliding window for two query
    columns, and a soft cap."""
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    turned = Turned(NARROW, MIXED, 32, 24, largest=6)
    draw = torch.Generator().manual_seed(4)
    span = PageSpan(
        torch.tensor([[2, 1], [0, 1], [0, 0]], dtype=torch.int32),
        torch.tensor([128, 70, 0], dtype=torch.int32),
        hidden=torch.rand(3, HEADS, 128, generator=draw) < 0.3,
        positions=torch.arange(3 * HEADS * PAGE, dtype=torch.int32).mul(89).remainder(211).view(3, HEADS, PAGE, 1),
        back=torch.tensor([[-1, 40], [500, 63], [0, 0]], dtype=torch.int32),
        bias=torch.randn(3, HEADS, 4, 128, generator=draw),
    )
    turned.check(turned.query(3, 4), span, 0, 211, precise=False, softcap=3.0, scored=programs == 1)


@pytest.mark.full
def test_what_lies_in_unused_slots_has_no_part():
    turned, found = Turned(NARROW, MIXED, 32, 32), []
    fold = turned.predicted()[1]
    span = PageSpan(torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([70], dtype=torch.int32))
    for garbage in (0, -1, 0x5A5A):
        for pages in (turned.keys, turned.values):
            pages.stream.pages[1, :, 6:] = garbage
            pages.stream.sizes[1, :, 6:] = garbage
        rope_tables = replace(turned.tables, **tables(turned.rotation, 0, 128))
        asked = turned.query(1, 3), turned.keys.stream, turned.values.stream, span
        found.append(operation.attend_pages(*asked, precise=True, rope_tables=rope_tables, fold=fold))
    for other in found[1:]:
        for name in ("top", "mass", "mixed"):
            assert torch.equal(getattr(found[0], name), getattr(other, name)), name


@pytest.mark.full
def test_a_row_is_attended_alike_alone_and_beside_others():
    """Each row has the same bits alone and in a batch, if its tokens are one part in both."""
    turned = Turned(MIXED, WIDE, 32, 32)
    query, rope_tables = turned.query(2, 2), replace(turned.tables, **tables(turned.rotation, 0, 128))
    table, used = torch.tensor([[2, 1], [0, 2]], dtype=torch.int32), torch.tensor([128, 90], dtype=torch.int32)
    both, *each = (
        operation.attend_pages(
            query[rows], turned.keys.stream, turned.values.stream, PageSpan(table[rows], used[rows]),
            rope_tables=rope_tables, fold=turned.predicted()[1],
        )
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
    )  # fmt: skip
    for name in ("top", "mass", "mixed"):
        assert torch.equal(getattr(both, name), torch.cat([getattr(one, name) for one in each])), name


def test_what_is_served():
    own = sizes_of(HEADS, PAGE, 1).words
    turned, plain = stored(NARROW, 1).stream, stored(WIDE, 2).stream
    sized_codes = replace(turned, sizes=own)
    assert triton.supports(2, sized_codes, replace(plain, sizes=own), rope_tables=True)
    assert triton.supports(2, plain, sized_codes)
    assert not triton.supports(2, sized_codes, plain)  # keys after RoPE
    for kind in (Kind(4, "token"), Kind(4, "channel", 32), Kind("float16")):
        stream = pages_of(kind, (3, HEADS, PAGE, 32), 1).stream
        assert triton.supports(2, plain, stream) and not triton.supports(2, plain, replace(stream, sizes=own))
    wider = sizes_of(5, PAGE, 1).words
    assert not triton.supports(2, sized_codes, replace(plain, sizes=wider), rope_tables=True)  # unlike the keys'
    lying = replace(sized_codes, sizes=torch.empty(3, 1, 2, PAGE, dtype=torch.int16).mT)  # plain torch's memory layout
    assert not triton.supports(2, plain, lying)
