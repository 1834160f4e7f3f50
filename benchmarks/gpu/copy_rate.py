"""How fast this device moves memory: the ceiling of everything that is bound by it."""

from functools import cache

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.turns import milliseconds

BYTES = {"cuda": 4 << 30, "cpu": 1 << 22}


@cache
def copy_rate(bench: Bench) -> float:
    """Bytes read plus bytes written a second, of a large copy; the median of 11."""
    source = torch.randint(0, 255, (BYTES[bench.device.type],), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    taken = sorted(milliseconds(bench, lambda: target.copy_(source)) for _ in range(11))[5]
    return 2 * source.numel() / taken * 1e3
