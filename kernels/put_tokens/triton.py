"""Copies tokens of each row into several tensors in one launch. See README.md."""

from collections.abc import Sequence
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.current_device import launching_on
from calib.kernels.launch import launch
from calib.kernels.powers import next_power_of_2
from calib.kernels.put_tokens.reference import Put

AT_ONCE = 6  # tensors of a launch: a prompt's words and parameters of keys and values, in whole pages and in the last
WIDEST = 16384  # most numbers that a program copies
OF_A_WARP = 2048  # numbers per warp

# Arguments that change from step to step or with the batch and must not cause a recompilation.
UNFIXED = [f"{name}_{i}" for i in range(AT_ONCE) for name in ("count", "slot")]


@triton.jit(do_not_specialize=UNFIXED)
def put(
    INTO_0, TOKENS_0, ROWS_0, PAGES_0, SLOTS_0, INTO_1, TOKENS_1, ROWS_1, PAGES_1, SLOTS_1,
    INTO_2, TOKENS_2, ROWS_2, PAGES_2, SLOTS_2, INTO_3, TOKENS_3, ROWS_3, PAGES_3, SLOTS_3,
    INTO_4, TOKENS_4, ROWS_4, PAGES_4, SLOTS_4, INTO_5, TOKENS_5, ROWS_5, PAGES_5, SLOTS_5,
    count_0, slot_0, heads_0, page_0, head_0, token_0, row_0, from_0, at_0, width_0,
    count_1, slot_1, heads_1, page_1, head_1, token_1, row_1, from_1, at_1, width_1,
    count_2, slot_2, heads_2, page_2, head_2, token_2, row_2, from_2, at_2, width_2,
    count_3, slot_3, heads_3, page_3, head_3, token_3, row_3, from_3, at_3, width_3,
    count_4, slot_4, heads_4, page_4, head_4, token_4, row_4, from_4, at_4, width_4,
    count_5, slot_5, heads_5, page_5, head_5, token_5, row_5, from_5, at_5, width_5,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Stores up to six tensors; a program handles a row, head and tensor. Absent ones are None, which is known at compile time."""
    which = tl.program_id(2)
    if which == 0:
        put_one(
            INTO_0, TOKENS_0, ROWS_0, PAGES_0, SLOTS_0, count_0, slot_0, heads_0, page_0, head_0, token_0, row_0,
            from_0, at_0, width_0, WIDE,
        )  # fmt: skip
    if INTO_1 is not None:  # noqa: SIM102
        if which == 1:
            put_one(
                INTO_1, TOKENS_1, ROWS_1, PAGES_1, SLOTS_1, count_1, slot_1, heads_1, page_1, head_1, token_1, row_1,
                from_1, at_1, width_1, WIDE,
            )  # fmt: skip
    if INTO_2 is not None:  # noqa: SIM102
        if which == 2:
            put_one(
                INTO_2, TOKENS_2, ROWS_2, PAGES_2, SLOTS_2, count_2, slot_2, heads_2, page_2, head_2, token_2, row_2,
                from_2, at_2, width_2, WIDE,
            )  # fmt: skip
    if INTO_3 is not None:  # noqa: SIM102
        if which == 3:
            put_one(
                INTO_3, TOKENS_3, ROWS_3, PAGES_3, SLOTS_3, count_3, slot_3, heads_3, page_3, head_3, token_3, row_3,
                from_3, at_3, width_3, WIDE,
            )  # fmt: skip
    if INTO_4 is not None:  # noqa: SIM102
        if which == 4:
            put_one(
                INTO_4, TOKENS_4, ROWS_4, PAGES_4, SLOTS_4, count_4, slot_4, heads_4, page_4, head_4, token_4, row_4,
                from_4, at_4, width_4, WIDE,
            )  # fmt: skip
    if INTO_5 is not None:  # noqa: SIM102
        if which == 5:
            put_one(
                INTO_5, TOKENS_5, ROWS_5, PAGES_5, SLOTS_5, count_5, slot_5, heads_5, page_5, head_5, token_5, row_5,
                from_5, at_5, width_5, WIDE,
            )  # fmt: skip


@triton.jit
def put_one(
    INTO, TOKENS, ROWS, PAGES, SLOTS, count, slot, heads, into_page, into_head, into_token, from_row, from_head, at, width,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Stores one row and head of one tensor. PAGES and SLOTS have a number per row or, if `at` > 0, per row and head; without SLOTS
    all use `slot`."""
    # Programs beyond the last row or head copy nothing.
    here = tl.where((tl.program_id(0) < count) & (tl.program_id(1) < heads), width, 0)
    number, head = tl.minimum(tl.program_id(0), count - 1), tl.minimum(tl.program_id(1), heads - 1)
    row = number.to(tl.int64)
    if ROWS is not None:
        row = tl.load(ROWS + number).to(tl.int64)
    page, index = row, number
    if at > 0:
        index = number * heads + head
    if PAGES is not None:
        page = tl.load(PAGES + index).to(tl.int64)
    head, token = head.to(tl.int64), tl.full([], slot, tl.int64)
    if SLOTS is not None:
        token = tl.load(SLOTS + index).to(tl.int64)
    column = tl.arange(0, WIDE)
    inside = column < here
    found = tl.load(TOKENS + row * from_row + head * from_head + column, mask=inside)
    tl.store(INTO + page * into_page + head * into_head + token * into_token + column, found, mask=inside)


def supports(one: Put) -> bool:
    """Whether the kernel supports this: one dtype and device, contiguous numbers and tokens, at most `WIDEST` numbers."""
    into, tokens = one.into, one.tokens
    width, together = into.shape[3], tokens.shape[2]
    return (
        into.dtype == tokens.dtype
        and into.device == tokens.device
        and (width == 1 or into.stride()[3] == tokens.stride()[3] == 1)
        and (together == 1 or into.stride()[2] == tokens.stride()[2] == width)
        and 0 < width * together <= WIDEST
    )


def put_tokens(puts: Sequence[Put]) -> list[Put]:
    """Stores all tokens that the kernel supports, and returns the other `puts`."""
    some, others = list[Put](), list[Put]()
    for one in puts:
        if not supports(one):
            others.append(one)
        elif (one.tokens if one.rows is None else one.rows).shape[0]:
            some.append(one)
    for first in range(0, len(some), AT_ONCE):
        _launch(some[first : first + AT_ONCE])
    return others


def _launch(puts: list[Put]) -> None:
    absent, most, most_heads, widest = AT_ONCE - len(puts), 0, 0, 0
    pointers, numbers = list[Tensor | None](), list[int]()
    for into, tokens, slots, rows, pages in puts:
        (_, heads, _, width), count = into.shape, (tokens if rows is None else rows).shape[0]
        width *= tokens.shape[2]
        own = pages is not None and pages.ndim == 2  # a page per head
        on_device, slot = (slots.contiguous(), 0) if isinstance(slots, Tensor) else (None, slots)
        rows, pages = rows if rows is None else rows.contiguous(), pages if pages is None else pages.contiguous()
        pointers += into, tokens, rows, pages, on_device
        numbers += count, slot, heads, *into.stride()[:3], *tokens.stride()[:2], int(own), width
        most, most_heads, widest = max(most, count), max(most_heads, heads), max(widest, width)
    with launching_on(puts[0].into):
        launch(
            put, (most, most_heads, len(puts)),
            *pointers, *[None] * (5 * absent), *numbers, *[0] * (10 * absent), **_constants(widest)
        )  # fmt: skip


@lru_cache
def _constants(widest: int) -> dict[str, int]:
    """Constants and warps of a launch whose programs copy at most `widest` numbers."""
    wide = next_power_of_2(widest)
    return {"WIDE": wide, "num_warps": max(1, wide // OF_A_WARP)}


def _specialisation(kind: str, count: int, width: int) -> Specialisation:
    """Specialisation for `count` tensors of a type, with slots on the device."""
    names, known = [name for name in put.arg_names if name != "WIDE"], dict(_constants(width))
    pointers = {name for name in names if name.isupper()}
    constants: dict[str, object] = {name: None if name in pointers else 0 for name in names if int(name[-1]) >= count}
    types = {name: "*i64" if name in pointers else "i32:16" for name in names if name not in constants}
    types |= {name: kind for name in types if name.startswith(("INTO", "TOKENS"))} | {
        name: "i32" for name in types if name in UNFIXED
    }
    warps = known.pop("num_warps")
    return Specialisation(put, types, constants | known, warps)


SPECIALISATIONS = {
    "a key and a value": _specialisation("*bf16", 2, 128),
    "words and parameters": _specialisation("*i16", 4, 32),
    "pages of words": _specialisation("*i16", 6, 2048),
}
