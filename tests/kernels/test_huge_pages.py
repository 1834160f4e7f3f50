"""Large temporaries of the CPU: asked for with huge pages, as good as any other where there are none, given back when dropped."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from pursuit_walk import normal

from calib.kernels import huge_pages
from calib.kernels.huge_pages import LEAST_BYTES, empty_large
from calib.kernels.matching_pursuit.reference import pursuit_by_gram

pytestmark = pytest.mark.arithmetic

MAPS = Path("/proc/self/smaps")
KERNEL_HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()
COLUMNS = 2**12
ROWS = LEAST_BYTES // (4 * COLUMNS)


def flags_at(address: int) -> list[str] | None:
    """The system's flags of the mapping with `address`, None where nothing is mapped."""
    found = None
    for line in MAPS.read_text().splitlines():
        start, dash, end = line.split()[0].partition("-")
        if dash:
            found = int(start, 16) <= address < int(end, 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("rows", [1, ROWS, 2 * ROWS + 1])
def test_room_is_of_the_shape_and_type_asked_for(rows: int, dtype: torch.dtype):
    room = empty_large(rows, COLUMNS, like=torch.empty(0, dtype=dtype))
    assert room.shape == (rows, COLUMNS) and room.dtype == dtype and room.is_contiguous()
    room.fill_(3)
    assert bool((room == 3).all())


@pytest.mark.skipif(
    not (MAPS.exists() and KERNEL_HAS_HUGE_PAGES),
    reason="needs a Linux with /proc/self/smaps and transparent huge pages",
)
def test_what_is_large_is_asked_for_with_huge_pages_and_given_back():
    like = torch.empty(0)
    room = empty_large(ROWS, COLUMNS, like)
    part, address = room[1:], room.data_ptr()
    assert "hg" in (flags_at(address) or [])  # advised; whether pages are huge is the system's own choice
    del room
    gc.collect()
    part.fill_(1)  # a view keeps it
    del part
    gc.collect()
    assert "hg" not in (flags_at(address) or [])
    small = empty_large(ROWS - 1, COLUMNS, like)
    assert "hg" not in (flags_at(small.data_ptr()) or [])


@pytest.mark.parametrize("advice", [None, -1])
def test_without_huge_pages_the_answer_is_the_same(advice: int | None, monkeypatch: pytest.MonkeyPatch):
    """-1 is refused by the system, as any advice on huge pages is where its kernel has none."""
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
