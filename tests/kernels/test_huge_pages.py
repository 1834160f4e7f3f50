"""Large temporaries on a CPU: requested with huge pages, usable without them as well, and released with the tensor."""

import gc
import mmap
import weakref

import pytest
import torch
from pursuit_walk import normal

from calib.kernels import huge_pages
from calib.kernels.huge_pages import LEAST_BYTES, empty_large
from calib.kernels.matching_pursuit.reference import pursuit_by_gram

pytestmark = pytest.mark.arithmetic

COLUMNS = 2**12
ROWS = LEAST_BYTES // (4 * COLUMNS)


class Block(mmap.mmap):
    """A memory mapping that remembers the advice it was given."""

    def madvise(self, option: int, *span: int) -> None:
        self.advised = option
        super().madvise(option, *span)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> "weakref.WeakSet[Block]":
    """The live mappings that `empty_large` made: a mapping is released with its object."""
    alive = weakref.WeakSet()

    def mapped(*args: int, **options: int) -> Block:
        block = Block(*args, **options)
        alive.add(block)
        return block

    monkeypatch.setattr(huge_pages.mmap, "mmap", mapped)
    return alive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("rows", [1, ROWS, 2 * ROWS + 1])
def test_room_is_of_the_shape_and_type_asked_for(rows: int, dtype: torch.dtype):
    room = empty_large(rows, COLUMNS, like=torch.empty(0, dtype=dtype))
    assert room.shape == (rows, COLUMNS) and room.dtype == dtype and room.is_contiguous()
    room.fill_(3)
    assert bool((room == 3).all())


@pytest.mark.full
@pytest.mark.skipif(huge_pages.ADVICE is None, reason="needs a system that takes advice on huge pages (Linux)")
def test_what_is_large_is_asked_for_with_huge_pages_and_given_back(blocks: "weakref.WeakSet[Block]"):
    like = torch.empty(0)
    room = empty_large(ROWS, COLUMNS, like)
    assert [block.advised for block in blocks] == [mmap.MADV_HUGEPAGE]
    part = room[1:]
    del room
    gc.collect()
    part.fill_(1)  # a view keeps it
    assert len(blocks) == 1
    del part
    gc.collect()
    assert not blocks
    assert empty_large(ROWS - 1, COLUMNS, like).shape == (ROWS - 1, COLUMNS) and not blocks


@pytest.mark.parametrize("advice", [None, -1])
def test_without_huge_pages_the_answer_is_the_same(advice: int | None, monkeypatch: pytest.MonkeyPatch):
    """The system refuses the advice -1, as a kernel without huge pages refuses advice on them."""
    if advice is not None:
        with pytest.raises(OSError, match="Invalid argument"):
            mmap.mmap(-1, mmap.PAGESIZE).madvise(advice)
    x, atoms = normal(20, 16, 3000)
    assert atoms.element_size() * len(atoms) ** 2 > LEAST_BYTES
    expected = pursuit_by_gram(x, atoms, 4)
    monkeypatch.setattr(huge_pages, "ADVICE", advice)
    assert all(torch.equal(*pair) for pair in zip(pursuit_by_gram(x, atoms, 4), expected, strict=True))


def test_another_device_has_its_own_memory():
    assert empty_large(2 * ROWS, COLUMNS, like=torch.empty(0, device="meta")).device.type == "meta"
