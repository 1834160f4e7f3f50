"""Weighted sums of rows by atom on a GPU: pairs are sorted by atom, and a program sums those of one atom in the order of the batch.

Without atomics, so that results are the same in every run. The products `[B, s, d]` are never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch

PAIRS = 16  # pairs that are read at once
WIDEST = 256  # most channels


@triton.jit
def add_rows(
    coefficient, order, first, rows, summed, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """Sums the pairs `order[first[n]] ... order[first[n + 1] - 1]` of an atom n: each is c times a row of `rows [B, D]`; a row has
    S pairs."""
    atom = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BD)
    used = channel < D
    end = tl.load(first + atom + 1)
    total = tl.zeros([BD], tl.float32)
    for start in range(tl.load(first + atom), end, BP):
        position = start + tl.arange(0, BP)
        inside = position < end
        pair = tl.load(order + position, mask=inside, other=0).to(tl.int32)  # a division of int32 is cheaper
        weight = tl.load(coefficient + pair, mask=inside, other=0.0)
        source = rows + (pair // S).to(tl.int64)[:, None] * D + channel[None, :]
        total += tl.sum(weight[:, None] * tl.load(source, mask=inside[:, None] & used[None, :], other=0.0), 0)
    tl.store(summed + atom * D + channel, total, mask=used)


def supports(coefficient: Tensor, index: Tensor, rows: Tensor, count: int) -> bool:
    """Whether the kernel supports these: float32 rows of at most 256 channels, fewer than 2^31 pairs, int64 indices."""
    supported = coefficient.dtype == rows.dtype == torch.float32 and index.dtype == torch.int64
    return supported and index.numel() < 2**31 and 0 < rows.shape[-1] <= WIDEST and count > 0


@torch.no_grad()
def scattered(coefficient: Tensor, index: Tensor, rows: Tensor, count: int) -> Tensor:
    """As `operation.scattered`."""
    width = rows.shape[-1]
    found, order = index.flatten().sort(stable=True)
    first = torch.searchsorted(found, torch.arange(count + 1, device=found.device))
    summed = rows.new_empty(count, width)
    launch(
        add_rows, (count,),
        coefficient.contiguous(), order, first, rows.contiguous(), summed,
        S=index.shape[-1], D=width, BD=triton.next_power_of_2(width), BP=PAIRS, num_warps=1,
    )  # fmt: skip
    return summed


TYPES = {"coefficient": "*fp32", "rows": "*fp32", "summed": "*fp32", "order": "*i64", "first": "*i64"}

SPECIALISATIONS = {
    f"d={width}": Specialisation(add_rows, TYPES, {"S": 8, "D": width, "BD": channels, "BP": PAIRS}, warps=1)
    for width, channels in ((80, 128), (128, 128), (256, 256))
}
