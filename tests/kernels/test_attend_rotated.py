"""Keys stored as codes of components before RoPE: the kernel rebuilds them, rotates them to their positions and attends them.
Interpreted, against float64."""

from dataclasses import replace

import pytest
import torch
from mixed_words import NARROW, PAGE, WIDE, Words, stored
from paged_attention import assert_attended, attention, of_rows
from rotated_keys import HEADS, keys_of, make_rope_tables, tables
from tolerances import ATTENTION, FLOAT32_ATTENTION, ROUNDED_SCORES, SPLIT_SCORES

from calib.kernels.attend import operation, triton
from calib.kernels.attend.operation import STRIDE, PageSpan
from calib.runtime.rotation import Rotation

# Padding lanes compute with infinities, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "room", lambda shape, like: torch.full(shape, torch.nan))


def assert_same(query, keys, rope_tables, values, span, rotation, positions, *, precise, **options):
    """Assert that the kernel's attention is that of float64."""
    assert triton.supports(query.shape[2], keys.stream, values.stream, rope_tables=True)
    scored, softcap = options.pop("scored", False), options.pop("softcap", None)
    found = operation.attend_pages(
        query, keys.stream, values.stream, span, None, softcap, scored, precise, rope_tables=rope_tables
    )
    expected = attention(query, keys, values, span, None, softcap, make_rope_tables(rotation, positions))
    # A rotated key is rounded like its query, and its channels are sums of terms as large as the largest component's.
    of_scores, of_output = (
        (4 * SPLIT_SCORES, FLOAT32_ATTENTION) if precise else (2 * ROUNDED_SCORES, ATTENTION[torch.float16])
    )
    assert_attended(found, expected, values.tokens, of_scores, of_output)


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize(
    ("own", "channels", "rotated", "query_rows"),
    [
        (NARROW, 32, 32, 1),
        (NARROW, 64, 16, 3),  # partial RoPE
        (WIDE, 48, 48, 2),  # half of the rotated channels is no power of two
        (Words((4, 3, 3, 2, 2, 1, 1), (2, 18, 6)), 24, 20, 9),
        (Words((8, 8), (4, 12, 0)), 64, 64, 1),
        (Words((1,) * 16, (2, 1, 3)), 40, 40, 65),
        (Words((5, 5, 5), (4, 3, 0), trellis=True), 32, 32, 2),
    ],
    ids=str,
)
def test_kernel(own, channels, rotated, query_rows, precise, monkeypatch):
    monkeypatch.setattr(triton, "_programs", lambda device: 9 if query_rows == 1 else 1)
    rotation = Rotation(10000.0 ** -torch.linspace(0, 1, rotated // 2, dtype=torch.float64))
    keys, rope_tables = keys_of(own, channels, 1)
    values = stored(WIDE if own is NARROW else NARROW, 2)
    first, slots = 1004, 2 * PAGE
    rope_tables = replace(rope_tables, **tables(rotation, first, slots))
    query = torch.randn(1, HEADS, query_rows, channels, generator=torch.Generator().manual_seed(3)) / channels**0.5
    span = PageSpan(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([117], dtype=torch.int32))
    positions = first + torch.arange(slots)
    assert_same(
        query, keys, rope_tables, values, span, rotation, positions, precise=precise, scored=query_rows in (1, 3)
    )


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 64])
def test_kernel_with_positions_of_tokens(programs, monkeypatch):
    """Rows of different lengths whose tokens have positions in any order, masked slots, a sliding window for two query columns, and
    a soft cap."""
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    rotation = Rotation(10000.0 ** -torch.linspace(0, 1, 12, dtype=torch.float64))
    (keys, rope_tables), values = keys_of(NARROW, 32, 1), stored(Words((4, 3, 3, 2, 2, 1, 1), (2, 18, 6)), 2)
    rope_tables = replace(rope_tables, **tables(rotation, 0, 211))
    draw = torch.Generator().manual_seed(4)
    table, used = torch.tensor([[2, 1], [0, 1], [0, 0]], dtype=torch.int32), torch.tensor([128, 70, 0])
    positions = torch.arange(3 * HEADS * PAGE, dtype=torch.int32).mul(89).remainder(211).view(3, HEADS, PAGE, 1)
    span = PageSpan(
        table,
        used.int(),
        hidden=torch.rand(3, HEADS, 128, generator=draw) < 0.3,
        positions=positions,
        back=torch.tensor([[-1, 40], [500, 63], [0, 0]], dtype=torch.int32),
    )
    query = torch.randn(3, HEADS, 4, 32, generator=draw) / 4
    assert_same(
        query, keys, rope_tables, values, span, rotation, of_rows(positions, table)[..., 0],
        precise=False, softcap=3.0, scored=programs == 1,
    )  # fmt: skip


def test_positions_of_slots_that_hold_nothing_are_not_read(monkeypatch):
    """Positions of slots behind `used` are 2^30, far outside the tables of cos and sin."""
    rotation = Rotation(10000.0 ** -torch.linspace(0, 1, 16, dtype=torch.float64))
    (keys, rope_tables), values = keys_of(NARROW, 32, 1), stored(WIDE, 2)
    rope_tables = replace(rope_tables, **tables(rotation, 0, 64))
    positions = torch.full((3, HEADS, PAGE, 1), 2**30, dtype=torch.int32)
    positions[:, :, :20, 0] = torch.arange(20)
    span = PageSpan(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([20], dtype=torch.int32), positions=positions)
    query = torch.randn(1, HEADS, 2, 32, generator=torch.Generator().manual_seed(3)) / 4
    wanted = of_rows(positions, span.table)[..., 0] % 2**30
    assert_same(query, keys, rope_tables, values, span, rotation, wanted, precise=True)


def test_tables_of_turns_are_those_of_their_positions():
    rotation = Rotation(10000.0 ** -torch.linspace(0, 1, 8, dtype=torch.float64))
    coarse, fine = rotation.strided(5, 5 + 3 * STRIDE + 1, torch.device("cpu"))
    assert coarse.shape == (4, 2, 8) and fine.shape == (STRIDE, 2, 8)
    for table, positions in ((coarse, 5 + STRIDE * torch.arange(4)), (fine, torch.arange(STRIDE))):
        angles = positions.double()[:, None] * rotation.frequencies
        assert torch.equal(table, torch.stack([angles.cos(), angles.sin()], 1).float())


def test_exact_keys_are_not_turned():
    values = stored(NARROW, 2)
    exact = operation.PackedStream(operation.EXACT, torch.zeros(1, HEADS, PAGE, 32), 32)
    assert triton.supports(1, exact, values.stream) and not triton.supports(1, exact, values.stream, rope_tables=True)


@pytest.mark.parametrize(("page", "served"), [(16, True), (48, True), (60, False)])
def test_pages_of_turned_keys_are_whole_turns(page, served):
    """A matrix instruction takes 16 tokens, and a turn of rotated keys ends with its page."""
    words = torch.zeros(2, 1, page, 12, dtype=torch.int16)
    stream = operation.PackedStream((4, 4, 4, 4), words, 24, counts=(6, 6))
    assert triton.supports(1, stream, stream) and triton.supports(1, stream, stream, rope_tables=True) == served
