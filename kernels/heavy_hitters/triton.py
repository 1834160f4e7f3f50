"""Decode step of a budget of heavy hitters (H2O) in two launches: choose the token to remove, and move tokens. See README.md."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.heavy_hitters.reference import BudgetSlots, MassRule, NewToken
from calib.kernels.launch import launch

AT_ONCE = 6  # most fields of a launch
WIDEST = 4096  # most numbers of a token and head in a field
TURN = 1024  # slots of a loop iteration

UNFIXED = ["slots", "shown", "table_row", "shown_row", "shown_head", "fresh_row", "fresh_head"]


@triton.jit(do_not_specialize=UNFIXED)
def choose(
    MASS, SHOWN, FRESH, RING, FREE, FIRST, LAST, TABLE, POSITIONS, FOUND,
    heads, slots, shown, table_row, shown_row, shown_head, fresh_row, fresh_head, position_page, position_head, position_token,
    ADDS_UP: tl.constexpr, LIMIT: tl.constexpr, MEAN: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Updates MASS and stores to FOUND page and slot of the ring's token, then page and slot that it moves to, each int64 `[rows,
    heads]`. A program handles a head of a row. Without MASS there are no scores."""
    item = tl.program_id(0)
    row, head = (item // heads).to(tl.int64), item % heads
    ring, target = tl.load(RING + row), tl.load(FREE + row)
    if MASS is not None:
        numbers = 1
        if MEAN:
            numbers = 2
        mass = MASS + (row * heads * numbers + head) * slots
        given = SHOWN + row * shown_row + head * shown_head
        first, last = tl.load(FIRST + row), tl.load(LAST + row)
        entering = observed(mass, given, ring, slots, shown, ADDS_UP, LIMIT)
        score = entering
        seen = entering
        if MEAN:
            seen = observed(mass + heads * slots, given + heads * shown_head, ring, slots, shown, ADDS_UP, LIMIT)
            score = tl.where(seen > 0, tl.div_rn(entering, tl.maximum(seen, 1.0)), 0.0)
        tl.debug_barrier()  # no warp writes before all have read
        least = tl.full([BN], float("inf"), tl.float32)
        newest, lightest = tl.full([BN], -1, tl.int32), tl.full([BN], 0, tl.int64)
        for start in range(0, slots, BN):
            slot = start + tl.arange(0, BN)
            own = observed(mass, given, slot, slots, shown, ADDS_UP, LIMIT)
            tl.store(mass + slot, own, mask=(slot < slots) & (slot < shown))
            if MEAN:
                rows = observed(mass + heads * slots, given + heads * shown_head, slot, slots, shown, ADDS_UP, LIMIT)
                tl.store(mass + heads * slots + slot, rows, mask=(slot < slots) & (slot < shown))
                own = tl.where(rows > 0, tl.div_rn(own, tl.maximum(rows, 1.0)), 0.0)
            heavy = (slot >= first) & (slot < last)
            page = tl.load(TABLE + row * table_row + slot // PAGE, mask=heavy, other=0).to(tl.int64)
            at = page * position_page + head * position_head + (slot % PAGE) * position_token
            position = tl.load(POSITIONS + at, mask=heavy, other=-1)
            lighter = heavy & ((own < least) | ((own == least) & (position > newest)))
            least, newest = tl.where(lighter, own, least), tl.where(lighter, position, newest)
            lightest = tl.where(lighter, slot.to(tl.int64), lightest)
        lowest = tl.min(least, 0)
        latest = tl.max(tl.where(least == lowest, newest, -1), 0)
        found = tl.max(tl.where((least == lowest) & (newest == latest), lightest, 0), 0)
        target = tl.where((first < last) & (score > lowest), found, target)
        tl.debug_barrier()
        tl.store(mass + target, entering, mask=target != ring)
        tl.store(mass + ring, tl.load(FRESH + row * fresh_row + head * fresh_head))
        if MEAN:
            tl.store(mass + heads * slots + target, seen, mask=target != ring)
            tl.store(mass + heads * slots + ring, tl.load(FRESH + row * fresh_row + (heads + head) * fresh_head))
    items = tl.num_programs(0)
    tl.store(FOUND + item, tl.load(TABLE + row * table_row + ring // PAGE).to(tl.int64))
    tl.store(FOUND + items + item, ring % PAGE)
    tl.store(FOUND + 2 * items + item, tl.load(TABLE + row * table_row + target // PAGE).to(tl.int64))
    tl.store(FOUND + 3 * items + item, target % PAGE)


@triton.jit
def observed(mass, given, slot, slots, shown, ADDS_UP: tl.constexpr, LIMIT: tl.constexpr):
    """Loads the mass of slots, updated by this step's attention (`given`) as by `MassRule.observe`."""
    there = slot < slots
    own = tl.load(mass + slot, mask=there, other=0.0)
    added = tl.load(given + slot, mask=there & (slot < shown), other=0.0)
    own = own + added if ADDS_UP else tl.where(slot < shown, added, own)
    if LIMIT is not None:
        own = tl.where(slot < shown, tl.minimum(own, LIMIT), own)
    return own


@triton.jit
def move(
    INTO_0, TOKEN_0, LOST_0, INTO_1, TOKEN_1, LOST_1, INTO_2, TOKEN_2, LOST_2,
    INTO_3, TOKEN_3, LOST_3, INTO_4, TOKEN_4, LOST_4, INTO_5, TOKEN_5, LOST_5, FOUND, heads,
    page_0, head_0, slot_0, row_0, from_0, page_1, head_1, slot_1, row_1, from_1, page_2, head_2, slot_2, row_2, from_2,
    page_3, head_3, slot_3, row_3, from_3, page_4, head_4, slot_4, row_4, from_4, page_5, head_5, slot_5, row_5, from_5,
    W_0: tl.constexpr, W_1: tl.constexpr, W_2: tl.constexpr, W_3: tl.constexpr, W_4: tl.constexpr, W_5: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Moves up to six fields; those whose pointers are None are absent. A program handles a head of a row and a field."""
    which = tl.program_id(1)
    if which == 0:
        move_one(INTO_0, TOKEN_0, LOST_0, FOUND, heads, page_0, head_0, slot_0, row_0, from_0, W_0, WIDE)
    if INTO_1 is not None:  # noqa: SIM102
        if which == 1:
            move_one(INTO_1, TOKEN_1, LOST_1, FOUND, heads, page_1, head_1, slot_1, row_1, from_1, W_1, WIDE)
    if INTO_2 is not None:  # noqa: SIM102
        if which == 2:
            move_one(INTO_2, TOKEN_2, LOST_2, FOUND, heads, page_2, head_2, slot_2, row_2, from_2, W_2, WIDE)
    if INTO_3 is not None:  # noqa: SIM102
        if which == 3:
            move_one(INTO_3, TOKEN_3, LOST_3, FOUND, heads, page_3, head_3, slot_3, row_3, from_3, W_3, WIDE)
    if INTO_4 is not None:  # noqa: SIM102
        if which == 4:
            move_one(INTO_4, TOKEN_4, LOST_4, FOUND, heads, page_4, head_4, slot_4, row_4, from_4, W_4, WIDE)
    if INTO_5 is not None:  # noqa: SIM102
        if which == 5:
            move_one(INTO_5, TOKEN_5, LOST_5, FOUND, heads, page_5, head_5, slot_5, row_5, from_5, W_5, WIDE)


@triton.jit
def move_one(
    INTO, TOKEN, LOST, FOUND, heads, into_page, into_head, into_slot, from_row, from_head, W: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Moves one field: the target slot to LOST, the ring's token to the target, and the new token to the ring's slot."""
    item, items = tl.program_id(0), tl.num_programs(0)
    row, head, column = (item // heads).to(tl.int64), item % heads, tl.arange(0, WIDE)
    inside = column < W
    own = INTO + head * into_head + column
    ring = tl.load(FOUND + item) * into_page + tl.load(FOUND + items + item) * into_slot
    target = tl.load(FOUND + 2 * items + item) * into_page + tl.load(FOUND + 3 * items + item) * into_slot
    old, lost = tl.load(own + ring, mask=inside), tl.load(own + target, mask=inside)
    tl.debug_barrier()  # no lane may store before all have loaded
    tl.store(LOST + item.to(tl.int64) * W + column, lost, mask=inside)
    tl.store(own + target, old, mask=column < tl.where(target == ring, 0, W))
    tl.store(own + ring, tl.load(TOKEN + row * from_row + head * from_head + column, mask=inside), mask=inside)


def supports(mass: Tensor, slots: BudgetSlots, tokens: Sequence[NewToken]) -> bool:
    """Whether the kernels support these: contiguous mass; fields with the dtype of their tokens, contiguous numbers, and a number
    of their own per KV head."""
    return mass.is_contiguous() and all(
        one.into.dtype == one.token.dtype
        and one.into.device == one.token.device == mass.device
        and one.into.shape[1] == one.token.shape[1] == slots.positions.shape[1]
        and (one.into.shape[3] == 1 or one.into.stride(3) == one.token.stride(3) == 1)
        and 0 < one.into.shape[3] <= WIDEST
        for one in tokens
    )


def enter_ring(
    rule: MassRule | None, mass: Tensor, shown: Tensor, fresh: Tensor, slots: BudgetSlots, tokens: Sequence[NewToken]
) -> list[Tensor]:
    """As `operation.enter_ring`."""
    (rows, heads), positions = (len(slots.ring), slots.positions.shape[1]), slots.positions
    shown = shown if shown.stride(2) == 1 or shown.shape[2] <= 1 else shown.contiguous()
    found = torch.empty(4, rows, heads, dtype=torch.int64, device=mass.device)
    scored = (None,) * 3 if rule is None else (mass, shown, fresh)
    strides = (0,) * 4 if rule is None else (*shown.stride()[:2], *fresh.stride()[:2])
    rule = rule or MassRule()
    with torch.cuda.device_of(mass):
        launch(
            choose, (rows * heads,),
            *scored, slots.ring, slots.free, slots.first, slots.last, slots.table, positions, found,
            heads, mass.shape[2], shown.shape[2], slots.table.stride(0), *strides, *positions.stride()[:3],
            ADDS_UP=rule.adds_up, LIMIT=rule.limit, MEAN=rule.mean, PAGE=positions.shape[2], BN=TURN, num_warps=4,
        )  # fmt: skip
        lost = [one.into.new_empty(rows, heads, 1, one.into.shape[3]) for one in tokens]
        for at in range(0, len(tokens), AT_ONCE):
            _move(tokens[at : at + AT_ONCE], lost[at : at + AT_ONCE], found)
    return lost


def _move(tokens: Sequence[NewToken], lost: list[Tensor], found: Tensor) -> None:
    absent, (_, rows, heads) = AT_ONCE - len(tokens), found.shape
    pointers = [part for one, gone in zip(tokens, lost, strict=True) for part in (*one, gone)]
    strides = [step for one in tokens for step in (*one.into.stride()[:3], *one.token.stride()[:2])]
    widths = [one.into.shape[3] for one in tokens]
    launch(
        move, (rows * heads, len(tokens)),
        *pointers, *[None] * (3 * absent), found, heads, *strides, *[0] * (5 * absent), *widths, *[0] * absent,
        WIDE=triton.next_power_of_2(max(widths)), num_warps=1,
    )  # fmt: skip


def _choosing(mean: bool) -> Specialisation:
    types = {name: "*i64" if name in ("RING", "FREE", "FIRST", "LAST", "FOUND") else "i32" for name in choose.arg_names}
    types |= dict.fromkeys(("MASS", "SHOWN", "FRESH"), "*fp32") | dict.fromkeys(("TABLE", "POSITIONS"), "*i32")
    constants = {"ADDS_UP": True, "LIMIT": None, "MEAN": mean, "PAGE": 64, "BN": TURN}
    return Specialisation(choose, {name: types[name] for name in types if name not in constants}, constants, warps=4)


def _moving(kind: str, fields: int, width: int) -> Specialisation:
    absent = [name for name in move.arg_names if name[-1].isdigit() and int(name[-1]) >= fields]
    constants: dict[str, object] = {name: None if name[0] in "ITL" else 0 for name in absent}
    constants |= {f"W_{i}": width for i in range(fields)} | {"WIDE": triton.next_power_of_2(width)}
    types = {name: kind if name.isupper() else "i32" for name in move.arg_names if name not in constants}
    return Specialisation(move, types | {"FOUND": "*i64"}, constants, warps=1)


SPECIALISATIONS = {
    "who loses": _choosing(mean=False),
    "who loses, by means": _choosing(mean=True),
    "exact tokens move": _moving("*bf16", 3, 128),
}
