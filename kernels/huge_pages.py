"""Memory for a large temporary of the CPU: what the system gives afresh it clears a page at a time, here 2 MiB and not 4 KiB.

An allocator keeps and reuses what is small. A large block it asks of the system and gives back at every call; written once,
as a Gram matrix is, a third of the time or more goes into its pages (benchmarks/pursuit_cpu.py).
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# The least that is worth it, 32 MiB: where glibc's allocator stops keeping blocks, however often they come.
LEAST_BYTES = 2**25

# Linux alone takes advice; elsewhere the system decides, as it does for every block.
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def empty_large(rows: int, columns: int, like: Tensor) -> Tensor:
    """`[rows, columns]` of the dtype and device of `like`, contents undefined; it lives as long as its storage."""
    size = rows * columns * like.element_size()
    if ADVICE is None or like.device.type != "cpu" or size < LEAST_BYTES:
        return like.new_empty(rows, columns)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without huge pages
        block.madvise(ADVICE)
    return torch.frombuffer(block, dtype=like.dtype).view(rows, columns)
