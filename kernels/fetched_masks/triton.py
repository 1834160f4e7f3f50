"""Masks for attention with fetched tokens on a GPU, in one launch: for each row and head, one program per stretch of slots, and one
for the exact and the fetched tokens.

Fetched tokens are few: a stretch makes a histogram of those in it, and every exact token is compared with all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch

SLOTS, EXACT = 2048, 32  # slots of a program; exact tokens that are compared at once
LEAST, MOST = 64, 128  # limits of the number of fetched tokens that are read at once


@triton.jit(do_not_specialize=["first", "slots", "m", "columns", "hidden_row", "back_row"])
def hide(
    POSITIONS, TOKENS, HIDDEN, BACK, REPLACED, UNSEEN,
    heads, n, first, slots, m, columns, hidden_row, back_row,
    SLOTS: tl.constexpr, EXACT: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Stores REPLACED `[rows * heads, slots]` and UNSEEN `[rows * heads, columns, m + n]`, the latter in the last program of a row
    and head."""
    pair, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = pair // heads
    POSITIONS += pair * n
    entry = tl.arange(0, AT_ONCE)
    if stretch < tl.num_programs(1) - 1:
        start = stretch * SLOTS
        counts = tl.zeros([SLOTS], tl.int32)
        for at in range(0, n, AT_ONCE):
            number = tl.load(POSITIONS + at + entry, mask=at + entry < n, other=-1) - first - start
            inside = (number >= 0) & (number < SLOTS) & (at + entry < n)
            counts += tl.histogram(tl.where(inside, number, 0), SLOTS, mask=inside)
        slot = start + tl.arange(0, SLOTS)
        tl.store(REPLACED + pair * slots + slot, (counts > 0).to(tl.int8), mask=slot < slots)
    else:
        UNSEEN += pair * columns * (m + n)
        for start in range(0, m, EXACT):
            token = start + tl.arange(0, EXACT)
            there = token < m
            own = tl.load(TOKENS + row * m + token, mask=there, other=-2).to(tl.int32)
            twins = tl.zeros([EXACT], tl.int32)
            for at in range(0, n, AT_ONCE):
                number = tl.load(POSITIONS + at + entry, mask=at + entry < n, other=-1)
                twins = tl.maximum(twins, tl.max((own[:, None] == number[None, :]).to(tl.int32), 1))
            for column in range(columns):
                hidden = twins
                if HIDDEN is not None:
                    hidden |= tl.load(HIDDEN + row * hidden_row + column * m + token, mask=there, other=0).to(tl.int32)
                tl.store(UNSEEN + column * (m + n) + token, hidden.to(tl.int8), mask=there)
        for at in range(0, n, AT_ONCE):
            there = at + entry < n
            number = tl.load(POSITIONS + at + entry, mask=there, other=-1)
            for column in range(columns):
                unseen = number < 0
                if BACK is not None:
                    unseen |= number <= tl.load(BACK + row * back_row + column)
                tl.store(UNSEEN + column * (m + n) + m + at + entry, unseen.to(tl.int8), mask=there)


def supports(positions: Tensor, exact: Tensor) -> bool:
    """Whether the kernel supports these: contiguous tensors."""
    return positions.is_contiguous() and exact.is_contiguous()


def fetched_masks(
    positions: Tensor, slots: range, exact: Tensor, hidden: Tensor | None, back: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `operation.fetched_masks`."""
    (rows, heads, n), m = positions.shape, exact.shape[2]
    columns = 1 if hidden is None else hidden.shape[2]
    replaced = torch.empty(rows, heads, len(slots), dtype=torch.bool, device=positions.device)
    unseen = torch.empty(rows, heads, columns, m + n, dtype=torch.bool, device=positions.device)
    mask = None if hidden is None else hidden.contiguous().view(torch.int8)
    at_once = min(MOST, max(LEAST, triton.next_power_of_2(n)))
    if rows * heads:
        with torch.cuda.device_of(positions):
            launch(
                hide, (rows * heads, triton.cdiv(len(slots), SLOTS) + 1),
                positions, exact, mask, None if back is None else back.contiguous(),
                replaced.view(torch.int8), unseen.view(torch.int8),
                heads, n, slots.start, len(slots), m, columns,
                0 if mask is None or mask.shape[0] == 1 else columns * m, 0 if back is None else back.shape[2],
                SLOTS=SLOTS, EXACT=EXACT, AT_ONCE=at_once,
            )  # fmt: skip
    return replaced, unseen


def _specialisation(at_once: int, masked: bool) -> Specialisation:
    types = {"POSITIONS": "*i32", "TOKENS": "*i64"} | dict.fromkeys(("HIDDEN", "REPLACED", "UNSEEN"), "*i8")
    types |= {"BACK": "*i64"} | dict.fromkeys(
        ("heads", "n", "first", "slots", "m", "columns", "hidden_row", "back_row"), "i32"
    )
    constants = {"SLOTS": SLOTS, "EXACT": EXACT, "AT_ONCE": at_once}
    return Specialisation(hide, types, constants | ({} if masked else {"HIDDEN": None, "BACK": None}))


SPECIALISATIONS = {"a column that sees all": _specialisation(LEAST, False), "columns": _specialisation(MOST, True)}
