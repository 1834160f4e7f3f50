"""Allocates large CPU temporaries in huge pages (2 MiB), so that fewer page faults occur at the first write.

The allocator keeps and reuses small blocks. It requests a large block from the system at every call and returns it afterwards. For
a block that is written once, such as a Gram matrix, page faults took a third of the time or more (benchmarks/pursuit_cpu.py).
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# Least size, 32 MiB: glibc's allocator never keeps larger blocks, however often they are requested.
LEAST_BYTES = 2**25

# `madvise(MADV_HUGEPAGE)` exists on Linux only; None elsewhere.
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def empty_large(rows: int, columns: int, like: Tensor) -> Tensor:
    """Uninitialised tensor `[rows, columns]` of the dtype and device of `like`, in huge pages if it is a large CPU tensor."""
    size = rows * columns * like.element_size()
    if ADVICE is None or like.device.type != "cpu" or size < LEAST_BYTES:
        return like.new_empty(rows, columns)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a Linux kernel without huge pages
        block.madvise(ADVICE)
    return torch.frombuffer(block, dtype=like.dtype).view(rows, columns)
