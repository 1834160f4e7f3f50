"""Prefetch from host memory by the interpreted kernels against plain torch, bit for bit; nothing else is read or written."""

import pytest
import torch
from torch import Tensor

from calib.kernels.host_gather import operation, reference

pytestmark = pytest.mark.arithmetic

triton = pytest.importorskip("calib.kernels.host_gather.triton", reason="Triton is not installed")

ANYWHERE = 2**62  # the page of entries that must not be read
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with -77, or True, so that entries which the kernel did not write are noticed."""

    def full(*shape: object, **of: object) -> Tensor:
        return torch.full(*shape, True if of["dtype"] == torch.bool else -77, **of)

    monkeypatch.setattr(triton.torch, "empty", full)


def drawn(draw: torch.Generator, rows: int, heads: int, n: int, reach: int, share: float) -> Tensor:
    """int64 `[rows, heads, n]`: about `share` n different tokens below `reach` in random entries; the others are empty, -1."""
    found = torch.full((rows, heads, n), -1)
    for own in found.view(-1, n):
        count = min(reach, n, int(torch.rand((), generator=draw) * 2 * share * n + 0.5))
        own[torch.randperm(n, generator=draw)[:count]] = torch.randperm(reach, generator=draw)[:count]
    return found


def check_exchange(held: Tensor, chosen: Tensor, reach: int, form=None) -> None:
    """Assert that entries, pages, slots and count are those of plain torch. Pages and slots count only for new tokens."""
    table = 5 + torch.arange(len(held) * (reach // 16 + 3), dtype=torch.int32).view(len(held), -1)[:, :-2]
    mine, other = held.int(), held.int()
    counts, before = [torch.tensor([2**33]) for _ in range(2)], chosen.clone()
    found = (form or triton.exchange)(mine, chosen, table, 16, counts[0])
    expected = reference.exchange(other, chosen, table, 16, reach, counts[1])
    assert torch.equal(chosen, before) and torch.equal(mine, other) and torch.equal(*counts)
    new = expected[2]
    assert found[2].dtype == torch.bool and torch.equal(found[2], new)
    for one, two in zip(found[:2], expected[:2], strict=True):
        assert one.dtype == two.dtype == torch.int64 and torch.equal(one[new], two[new])


@pytest.mark.parametrize("n", [1, 2, 7, 63, 64, 65, 130])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_entries_are_exchanged_as_plainly(n, share):
    draw = torch.Generator().manual_seed(n)
    for reach in (1, n, 2 * n, 10**6) if n < 10 else (2 * n,):
        held, chosen = drawn(draw, 2, 2, n, reach, 0.5), drawn(draw, 2, 2, n, reach, share)
        check_exchange(held, chosen, reach)
        check_exchange(held, drawn(draw, 2, 2, (n + 1) // 2, reach, share), reach)


def test_entries_that_all_hold_a_token():
    """No entry is empty, and -1 among the chosen tokens is not fetched all the same."""
    draw = torch.Generator().manual_seed(2)
    held = torch.stack([torch.randperm(100, generator=draw)[:64] for _ in range(6)]).view(3, 2, 64)
    chosen = drawn(draw, 3, 2, 64, 100, 0.5)
    check_exchange(held, chosen, 100)


@pytest.mark.full
def test_the_largest_block_that_a_program_compares():
    draw = torch.Generator().manual_seed(0)
    held, chosen = (drawn(draw, 1, 1, triton.MOST // 2 + 3, 700, 0.8) for _ in range(2))
    check_exchange(held, chosen, 700)


def test_rows_of_more_entries_change_alone():
    draw = torch.Generator().manual_seed(1)
    whole, chosen = (drawn(draw, 4, 3, 20, 30, 0.5) for _ in range(2))
    whole, before = whole.int(), whole.int()
    table, count = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    triton.exchange(whole[1:3], chosen[1:3], table[1:3], 16, count)
    reference.exchange(before[1:3], chosen[1:3], table[1:3], 16, 30, count)
    assert torch.equal(whole, before) and int(count) > 0


def test_no_entries_and_nothing_chosen():
    draw = torch.Generator().manual_seed(1)
    held = drawn(draw, 4, 3, 20, 30, 0.5)
    check_exchange(held, held[:, :, :0].contiguous(), 30)
    nothing, count = held[:, :, :0].int(), torch.zeros(1, dtype=torch.int64)
    found = triton.exchange(nothing, nothing.long(), torch.zeros(4, 1, dtype=torch.int32), 16, count)
    assert [part.shape for part in found] == [nothing.shape] * 3 and int(count) == 0


def gathered(
    shape: tuple[int, ...], width: int, dtype: torch.dtype, share: float, slots: int = 8, pages: int = 5
) -> None:
    """Compare the kernel with plain torch. Source tokens that are not wanted, and all entries and the memory around them, are NaN
    before."""
    draw = torch.Generator().manual_seed(3)
    (rows, heads, n), asked = shape, torch.rand(shape, generator=draw) < share
    number = torch.randint(0, pages, shape, generator=draw).masked_fill(~asked, ANYWHERE)
    slot = torch.randint(0, slots, shape, generator=draw).masked_fill(~asked, -ANYWHERE)
    real = torch.randn(pages, heads, slots, width, generator=draw).to(dtype)
    source = torch.full_like(real, torch.nan)
    row, head, entry = asked.nonzero(as_tuple=True)
    at = number[row, head, entry], head, slot[row, head, entry]
    source[at] = real[at]
    whole = torch.full((rows + 2, heads, n, width), torch.nan, dtype=dtype)
    bits = whole.view(BITS[dtype.itemsize])
    bits += torch.arange(bits.numel()).view(bits.shape).to(bits.dtype) % 100  # NaNs with different bits
    expected = whole.clone()
    reference.host_gather(source, number, slot, asked, expected[1:-1])
    triton.host_gather(source, number, slot, asked, whole[1:-1])
    assert torch.equal(bits, expected.view(bits.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_wanted_tokens_come_and_the_rest_stays(dtype, share):
    gathered((3, 2, 11), 64, dtype, share)


@pytest.mark.parametrize("width", [1, 6, 33, 64, 128, 160, 192, 256, 512])
def test_every_width(width):
    """Key and value of 32, 64, 80, 96, 128 or 256 channels together, and other widths."""
    gathered((1, 2, 9), width, torch.bfloat16, 0.5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 63), (1, 1, 1000), (3, 2, 101)], ids=str)
def test_more_tiles_than_programs_and_fewer(shape):
    gathered(shape, 8, torch.float16, 0.4)
    gathered(shape, 512, torch.float32, 0.05)


def test_nothing_to_fetch_and_no_pages():
    into = torch.ones(2, 2, 3, 6)
    nowhere = torch.zeros(2, 2, 3, dtype=torch.int64)
    triton.host_gather(torch.zeros(0, 2, 8, 6), nowhere, nowhere, nowhere.bool(), into)
    assert (into == 1).all()
    nothing = nowhere[:, :, :0]
    triton.host_gather(torch.zeros(1, 2, 8, 6), nothing, nothing, nothing.bool(), into[:, :, :0])


def test_what_the_kernel_leaves_to_the_plain_form():
    pages, into = torch.zeros(2, 2, 8, 6), torch.zeros(3, 2, 4, 6)
    assert triton.supports(pages, into)
    assert not triton.supports(pages.to("meta"), into)  # ordinary host memory, entries on a device
    assert not triton.supports(pages.half(), into)
    assert not triton.supports(pages.to(torch.float8_e4m3fn), into.to(torch.float8_e4m3fn))
    assert not triton.supports(pages, into.mT.contiguous().mT)
    many = torch.zeros(2, 1, triton.MOST)
    assert triton.supports_exchange(many, many) and triton.supports_exchange(many[1:], many[:1, :, :3].contiguous())
    assert not triton.supports_exchange(torch.zeros(1, 1, triton.MOST + 1), many)
    assert not triton.supports_exchange(many[:, :, :3], many) and not triton.supports_exchange(many, many[:, :, :3])


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operations_run_what_serves(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    asked = []
    for name in ("exchange", "host_gather"):
        original = getattr(triton, name)
        monkeypatch.setattr(triton, name, lambda *given, do=original: asked.append(1) or do(*given))
    draw = torch.Generator().manual_seed(5)
    held, chosen = (drawn(draw, 2, 2, 9, 30, 0.6) for _ in range(2))
    check_exchange(held, chosen, 30, lambda *given: operation.exchange(*given[:4], 30, given[4]))
    pages, into = torch.randn(5, 2, 8, 6), torch.zeros(2, 2, 9, 6)
    at, new = chosen.clamp(min=0), chosen >= 0
    operation.host_gather(pages, at // 8, at % 8, new, into)
    assert len(asked) == (2 if forced == "triton" else 0)
    expected = torch.zeros_like(into)
    reference.host_gather(pages, at // 8, at % 8, new, expected)
    assert torch.equal(into, expected)
    asked.clear()
    many = torch.arange(1500).view(1, 1, -1)
    check_exchange(many, many, 1500, lambda *given: operation.exchange(*given[:4], 1500, given[4]))
    assert not asked
