"""The parts of a softmax that the runs of `decode_kernel.py` leave, as one."""

import triton
import triton.language as tl

from calib.kernels.attend.decode_kernel import LOG2E, NOTHING


@triton.jit
def merge(TOP, MASS, MIXED, TOP_ALL, MASS_ALL, MIXED_ALL, splits, query_rows, D: tl.constexpr, DP: tl.constexpr):
    """The parts of all splits `[rows of all heads, splits, R(, D)]` as one, for one query row a program."""
    of_row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, DP)
    top, mass, mixed = tl.full([], NOTHING, tl.float32), tl.full([], 0.0, tl.float32), tl.zeros([DP], tl.float32)
    for split in range(splits):
        part = (of_row * splits + split) * query_rows + query
        own = tl.load(TOP + part)
        higher = tl.maximum(top, own)
        stays, comes = tl.exp2((top - higher) * LOG2E), tl.exp2((own - higher) * LOG2E)
        mass = mass * stays + tl.load(MASS + part) * comes
        mixed = mixed * stays + tl.load(MIXED + part * D + channels, mask=channels < D, other=0.0) * comes
        top = higher
    out = of_row * query_rows + query
    tl.store(TOP_ALL + out, top)
    tl.store(MASS_ALL + out, mass)
    tl.store(MIXED_ALL + out * D + channels, mixed, mask=channels < D)
