"""The device's rate of copying memory, the upper bound for operations limited by memory bandwidth."""

from functools import cache

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.turns import milliseconds

BYTES = {"cuda": 4 << 30, "cpu": 1 << 22}


@cache
def copy_rate(bench: Bench) -> float:
    """Returns bytes read plus bytes written per second of a large copy; the median of 11."""
    source = torch.randint(0, 255, (BYTES[bench.device.type],), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    taken = sorted(milliseconds(bench, lambda: target.copy_(source)) for _ in range(11))[5]
    return 2 * source.numel() / taken * 1e3
