"""Prefetch of chosen tokens from host memory, plain torch: which entries of the device cache are replaced, and that no other entry
is written."""

import pytest
import torch
from torch import Tensor

from calib.kernels.host_gather import reference
from calib.kernels.host_gather.reference import host_gather

pytestmark = pytest.mark.arithmetic

ROWS, HEADS = 3, 2
TRIALS = 200


def exchange(held: Tensor, chosen: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Entries after the exchange, and which are new. Asserts that pages and slots of new tokens follow the table, and their
    count."""
    entries, fetched = held.int(), torch.tensor([7])
    table = 10 + torch.arange(len(held) * (reach // 3 + 1), dtype=torch.int32).view(len(held), -1)
    numbers, slots, new = reference.exchange(entries, chosen, table, 3, reach, fetched)
    assert fetched.tolist() == [7 + int(new.sum())]
    assert entries.dtype == torch.int32 and numbers.dtype == slots.dtype == torch.int64
    row, head, entry = new.nonzero(as_tuple=True)
    token = entries[row, head, entry].long()
    assert torch.equal(numbers[row, head, entry], table[row, token // 3].long())
    assert torch.equal(slots[row, head, entry], token % 3)
    return entries.long(), new


def held_by(entries: Tensor) -> list[list[set[int]]]:
    """The set of tokens in the entries of each row and head."""
    return [[{int(token) for token in own if token >= 0} for own in row] for row in entries]


def drawn(draw: torch.Generator, n: int, reach: int) -> Tensor:
    """int64 `[ROWS, HEADS, n]`: up to n different tokens below `reach` in random entries; the other entries are empty, -1."""
    found = torch.full((ROWS, HEADS, n), -1)
    for row in range(ROWS):
        for head in range(HEADS):
            count = int(torch.randint(0, min(n, reach) + 1, (), generator=draw))
            tokens = torch.randperm(reach, generator=draw)[:count]
            found[row, head, torch.randperm(n, generator=draw)[:count]] = tokens
    return found


@pytest.mark.parametrize("n", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("reach", [1, 8, 50, 500])
def test_whoever_stays_keeps_its_entry_and_the_others_make_room(n, reach):
    draw = torch.Generator().manual_seed(n * 1000 + reach)
    for _ in range(TRIALS // 20 if n > 7 else TRIALS // 4):
        held, chosen = drawn(draw, n, reach), drawn(draw, n, reach)
        before = held.clone(), chosen.clone()
        entries, new = exchange(held, chosen, reach)
        assert torch.equal(held, before[0]) and torch.equal(chosen, before[1])
        assert entries.shape == held.shape == new.shape and (entries.dtype, new.dtype) == (torch.int64, torch.bool)
        assert held_by(entries) == held_by(chosen)  # exactly the chosen tokens
        assert int((entries >= 0).sum()) == int((chosen >= 0).sum())  # none twice
        wanted = [
            [c - h for c, h in zip(*pair, strict=True)] for pair in zip(held_by(chosen), held_by(held), strict=True)
        ]
        assert held_by(entries.masked_fill(~new, -1)) == wanted  # only tokens that were missing are fetched
        assert torch.equal(entries[~new & (entries >= 0)], held[~new & (entries >= 0)])  # the others keep their entries


def test_everything_may_change_and_nothing():
    held = torch.tensor([[[4, -1, 2, 9]]])
    entries, new = exchange(held, torch.tensor([[[9, 4, 2, -1]]]), 10)
    assert torch.equal(entries, held) and not new.any()
    entries, new = exchange(held, torch.tensor([[[0, 1, 3, 5]]]), 10)
    assert sorted(entries.flatten().tolist()) == [0, 1, 3, 5] and new.all()
    entries, new = exchange(held, torch.full_like(held, -1), 10)
    assert (entries == -1).all() and not new.any()
    entries, new = exchange(torch.full_like(held, -1), held, 10)
    assert held_by(entries) == held_by(held) and torch.equal(new, entries >= 0)


def test_rows_and_heads_do_not_see_each_other():
    draw = torch.Generator().manual_seed(1)
    held, chosen = drawn(draw, 9, 30), drawn(draw, 9, 30)
    together = exchange(held, chosen, 30)
    for row in range(ROWS):
        for head in range(HEADS):
            alone = exchange(*(part[row : row + 1, head : head + 1] for part in (held, chosen)), 30)
            for mine, whole in zip(alone, together, strict=True):
                assert torch.equal(mine[0, 0], whole[row, head])


def test_fewer_are_chosen_than_there_are_entries():
    draw = torch.Generator().manual_seed(4)
    held, chosen = drawn(draw, 9, 30), drawn(draw, 5, 30)
    whole = torch.nn.functional.pad(chosen, (0, 4), value=-1)
    for mine, other in zip(exchange(held, chosen, 30), exchange(held, whole, 30), strict=True):
        assert torch.equal(mine, other)


def test_a_larger_reach_changes_nothing():
    draw = torch.Generator().manual_seed(2)
    held, chosen = drawn(draw, 9, 30), drawn(draw, 9, 30)
    for mine, other in zip(exchange(held, chosen, 30), exchange(held, chosen, 1000), strict=True):
        assert torch.equal(mine, other)


PAGES, SLOTS, WIDTH = 5, 8, 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", ["none", "some", "all"])
def test_wanted_tokens_come_and_the_rest_stays(dtype, wanted):
    """Source tokens that are not wanted, and all entries before, are NaN: entries that are not wanted keep their bits."""
    draw = torch.Generator().manual_seed(3)
    n = 11
    numbers = torch.randint(0, PAGES, (ROWS, HEADS, n), generator=draw)
    slots = torch.randint(0, SLOTS, (ROWS, HEADS, n), generator=draw)
    mark = {"none": 0.0, "some": 0.4, "all": 1.0}[wanted]
    asked = torch.rand(ROWS, HEADS, n, generator=draw) < mark
    real = torch.randn(PAGES, HEADS, SLOTS, WIDTH, generator=draw).to(dtype)
    pages = torch.full_like(real, torch.nan)
    row, head, entry = asked.nonzero(as_tuple=True)
    at = numbers[row, head, entry], head, slots[row, head, entry]
    pages[at] = real[at]
    into = torch.full((ROWS, HEADS, n, WIDTH), torch.nan, dtype=dtype)
    into.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[:] += torch.arange(
        1, WIDTH + 1, dtype=torch.int16
    )
    bits = into.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    before, source = bits.clone(), pages.clone()
    host_gather(pages, numbers, slots, asked, into)
    assert torch.equal(bits[~asked], before[~asked])
    assert torch.equal(into[asked], real[at])
    assert torch.equal(pages.nan_to_num(7), source.nan_to_num(7))


def test_nothing_to_fetch_and_no_pages():
    into = torch.ones(2, HEADS, 3, WIDTH)
    nowhere = torch.zeros(2, HEADS, 3, dtype=torch.int64)
    host_gather(torch.zeros(0, HEADS, SLOTS, WIDTH), nowhere, nowhere, nowhere.bool(), into)
    assert (into == 1).all()
    nothing = nowhere[:, :, :0]
    host_gather(torch.zeros(1, HEADS, SLOTS, WIDTH), nothing, nothing, nothing.bool(), into[:, :, :0])


def test_entries_that_are_a_part_of_a_larger_tensor():
    """The entries of some rows of a batch, as a layer fetches for them."""
    into, pages = torch.zeros(4, HEADS, 3, WIDTH), torch.randn(PAGES, HEADS, SLOTS, WIDTH)
    number = torch.full((2, HEADS, 3), 2)
    host_gather(pages, number, number + 1, torch.ones(2, HEADS, 3, dtype=torch.bool), into[1:3])
    assert torch.equal(into[1:3], pages[2, :, 3][None, :, None].expand(2, -1, 3, -1))
    assert (into[0] == 0).all() and (into[3] == 0).all()


def test_without_a_cpu_no_number_is_asked_for():
    """No number is read back from the device, which would synchronise a GPU: on the meta device it would raise an error."""
    numbers = torch.zeros(ROWS, HEADS, 4, dtype=torch.int64, device="meta")
    pages, into = (
        torch.zeros(PAGES, HEADS, SLOTS, WIDTH, device="meta"),
        torch.zeros(ROWS, HEADS, 4, WIDTH, device="meta"),
    )
    table, count = numbers[:, 0].int(), numbers[0, 0, :1]
    pages_of, slots, new = reference.exchange(numbers.int(), numbers, table, 3, 9, count)
    host_gather(pages, pages_of, slots, new, into)
    assert pages_of.shape == slots.shape == new.shape == numbers.shape
    with pytest.raises((NotImplementedError, RuntimeError)):
        new.nonzero()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reading host memory from a device needs a CUDA device")
def test_a_device_gathers_what_the_host_does():
    draw = torch.Generator().manual_seed(4)
    numbers = torch.randint(0, PAGES, (ROWS, HEADS, 9), generator=draw)
    slots, asked = (
        torch.randint(0, SLOTS, numbers.shape, generator=draw),
        torch.rand(numbers.shape, generator=draw) < 0.5,
    )
    pages = torch.randn(PAGES, HEADS, SLOTS, WIDTH, generator=draw)
    expected = torch.full((ROWS, HEADS, 9, WIDTH), 5.0)
    found = expected.cuda()
    host_gather(pages, numbers, slots, asked, expected)
    for where in (pages, pages.cuda()):
        host_gather(where, *(part.cuda() for part in (numbers, slots, asked)), found)
        assert torch.equal(found.cpu(), expected)
        found.fill_(5.0)
