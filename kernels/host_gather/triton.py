"""Fetches tokens from host memory on a GPU: a few programs, which run beside the kernels of a step, read only the wanted tokens.

Rows are copied as integers of 32 or 16 bits, whatever their dtype. Another kernel decides which entry takes which token and
computes
its address: a program for a row and head compares every held token with every chosen token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch

# Programs with 32 KB in flight each: enough to saturate the link to the host, too few to delay a step's own kernels.
PROGRAMS, WARPS = 8, 8
BYTES = 2**15

# Most entries that a program compares with all chosen tokens, and pairs that are compared at once.
MOST = 1024
PAIRS = 4096


@triton.jit
def gather_rows(
    pages, numbers, slots, wanted, into,
    page_stride, head_stride, slot_stride, into_row, into_head, into_entry, heads, n, entries,
    W: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copies W numbers for each wanted one of `entries` entries; programs take tiles of ROWS entries in turn."""
    column = tl.arange(0, WIDTH)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(entries, ROWS), tl.num_programs(0)):
        entry = tile * ROWS + tl.arange(0, ROWS)
        inside = entry < entries
        comes = tl.load(wanted + entry, mask=inside, other=0) != 0
        page = tl.load(numbers + entry, mask=comes, other=0)
        slot = tl.load(slots + entry, mask=comes, other=0)
        pair = entry // n
        row, head, position = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64), entry % n
        source = pages + page * page_stride + head * head_stride + slot * slot_stride
        target = into + row * into_row + head * into_head + position * into_entry
        mask = comes[:, None]
        if WIDTH != W:
            mask = mask & (column < W)
        tl.store(target[:, None] + column, tl.load(source[:, None] + column, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["wanted", "table_width", "page_tokens"])
def exchange_entries(
    held, chosen, table, numbers, slots, new, fetched, heads, n, wanted, table_width, page_tokens,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Updates `held [rows * heads, n]` to hold the tokens `chosen [rows * heads, wanted]`; stores which entries are `new`, and
    their page `numbers` and `slots`. A program handles a row and head; BLOCK is at least n."""
    pair = tl.cast(tl.program_id(0), tl.int64)
    start, own_table = pair * n, table + pair // heads * table_width
    block = tl.arange(0, BLOCK)
    tokens = tl.load(chosen + pair * wanted + block, mask=block < wanted, other=-1).to(tl.int32)
    is_held = tl.zeros([BLOCK], tl.int32)
    for at in range(0, n, TILE):
        position = at + tl.arange(0, TILE)
        own = tl.load(held + start + position, mask=position < n, other=-1)
        is_held = tl.maximum(is_held, tl.max((own[:, None] == tokens[None, :]).to(tl.int32), 0))
    arrives = (tokens >= 0) & (is_held == 0)
    turn = tl.where(arrives, tl.cumsum(arrives.to(tl.int32), 0), 0)  # i for the i-th new token, 0 for others

    free_before = tl.full([], 0, tl.int32)
    for at in range(0, n, TILE):
        position = at + tl.arange(0, TILE)
        inside = position < n
        own = tl.load(held + start + position, mask=inside, other=-1)
        chosen_again = tl.max((own[:, None] == tokens[None, :]).to(tl.int32), 1) != 0
        free = inside & ((own < 0) | (chosen_again == 0))
        freed = free_before + tl.cumsum(free.to(tl.int32), 0)
        free_before += tl.sum(free.to(tl.int32), 0)
        taker = free[:, None] & (freed[:, None] == turn[None, :])
        token = tl.max(tl.where(taker, tokens[None, :], -1), 1)
        comes = free & (token >= 0)
        tl.debug_barrier()  # all threads of the program must have read `held` before it changes
        tl.store(held + start + position, tl.where(free, token, own), mask=inside)
        page = tl.load(own_table + token // page_tokens, mask=comes, other=0).to(tl.int64)
        tl.store(numbers + start + position, page, mask=inside)
        tl.store(slots + start + position, tl.where(comes, token % page_tokens, 0).to(tl.int64), mask=inside)
        tl.store(new + start + position, comes.to(tl.int8), mask=inside)
    arrived = tl.sum(arrives.to(tl.int64), 0)
    tl.atomic_add(fetched, arrived, sem="relaxed")  # integers: the sum does not depend on the order


def supports_exchange(held: Tensor, chosen: Tensor) -> bool:
    """Whether the kernel supports these: at most `MOST` entries, contiguous tensors."""
    return held.shape[2] <= MOST and held.is_contiguous() and chosen.is_contiguous()


def exchange(
    held: Tensor, chosen: Tensor, table: Tensor, page_tokens: int, fetched: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `operation.exchange`; it needs no bound of token numbers below 2^31."""
    rows, heads, n = held.shape
    numbers, slots = (torch.empty(held.shape, dtype=torch.int64, device=held.device) for _ in range(2))
    new = torch.empty(held.shape, dtype=torch.bool, device=held.device)
    if held.numel():
        block = max(32, triton.next_power_of_2(n))
        with torch.cuda.device_of(held):
            launch(
                exchange_entries, (rows * heads,),
                held, chosen, table, numbers, slots, new.view(torch.int8), fetched,
                heads, n, chosen.shape[2], table.stride(0), page_tokens, BLOCK=block, TILE=min(block, PAIRS // block),
            )  # fmt: skip
    return numbers, slots, new


def supports(pages: Tensor, into: Tensor) -> bool:
    """Whether the kernel supports these: device-mapped memory, contiguous rows of one dtype with at least 2 bytes."""
    return (
        pages.device == into.device
        and pages.dtype == into.dtype
        and pages.stride(3) == into.stride(3) == 1
        and pages.element_size() > 1
        and into.shape[:3].numel() < 2**31
    )


def host_gather(pages: Tensor, numbers: Tensor, slots: Tensor, wanted: Tensor, into: Tensor) -> None:
    """As `operation.host_gather`."""
    if not into.numel() or not pages.numel():
        return
    pages, into = _as_integers(pages, into)
    heads, n, width = into.shape[1:]
    padded = triton.next_power_of_2(width)
    entries = into.shape[:3].numel()
    tile = _tile(padded, into.element_size())
    marks = wanted.contiguous().view(torch.int8)
    with torch.cuda.device_of(into):
        launch(
            gather_rows, (min(PROGRAMS, triton.cdiv(entries, tile)),),
            pages, numbers.contiguous(), slots.contiguous(), marks, into,
            *pages.stride()[:3], *into.stride()[:3], heads, n, entries,
            W=width, WIDTH=padded, ROWS=tile, num_warps=WARPS,
        )  # fmt: skip


def _as_integers(pages: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """View both as int32, or as int16 if rows are not aligned to 4 bytes."""
    size = into.element_size()
    starts = [part * size for tensor in (pages, into) for part in (*tensor.stride()[:3], tensor.storage_offset())]
    width = torch.int32 if all(start % 4 == 0 for start in (*starts, into.shape[3] * size)) else torch.int16
    return pages.view(width), into.view(width)


def _tile(padded: int, size: int) -> int:
    """Rows of `padded` numbers of `size` bytes that a program has in flight at once."""
    return max(1, BYTES // (padded * size))


def _specialisations() -> dict[str, Specialisation]:
    types = {"pages": "*i32", "into": "*i32", "numbers": "*i64", "slots": "*i64", "wanted": "*i8"}
    types |= dict.fromkeys(
        ("page_stride", "head_stride", "slot_stride", "into_row", "into_head", "into_entry"), "i32:16"
    )
    types |= dict.fromkeys(("heads", "n", "entries"), "i32")
    width = 128  # numbers of 32 bits: keys and values of 128 channels of 16
    known = {"W": width, "WIDTH": width, "ROWS": _tile(width, 4)}
    lists = dict.fromkeys(("held", "table"), "*i32") | {"new": "*i8"}
    lists |= dict.fromkeys(("chosen", "numbers", "slots", "fetched"), "*i64")
    lists |= dict.fromkeys(("heads", "n", "wanted", "table_width", "page_tokens"), "i32")
    return {
        "rows of 512 bytes": Specialisation(gather_rows, types, known, WARPS),
        "exchange of 64": Specialisation(exchange_entries, lists, {"BLOCK": 64, "TILE": 64}),
        "exchange of 1024": Specialisation(exchange_entries, lists, {"BLOCK": 1024, "TILE": 4}),
    }


SPECIALISATIONS = _specialisations()
