"""Sums attention probabilities over query rows, for up to four spans in one launch. See README.md."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.current_device import launching_on
from calib.kernels.launch import launch
from calib.kernels.powers import cdiv, next_power_of_2
from calib.kernels.probability_mass.reference import ScoredTokens

AT_ONCE = 4  # most spans of a launch
TOKENS = 256  # tokens of a program
LOG2E = tl.constexpr(1.4426950408889634)

# Arguments that change from step to step or with the batch and must not cause a recompilation.
_OF_SPAN = ("tokens", "row", "head", "query", "position_row", "position_head", "first", "width")
UNFIXED = ["query_rows", "mass_row", "mass_head", *(f"{name}_{i}" for i in range(AT_ONCE) for name in _OF_SPAN)]


@triton.jit(do_not_specialize=UNFIXED)
def sum_rows(
    SCORES_0, WEIGHTS_0, POSITIONS_0, MASS_0, SCORES_1, WEIGHTS_1, POSITIONS_1, MASS_1,
    SCORES_2, WEIGHTS_2, POSITIONS_2, MASS_2, SCORES_3, WEIGHTS_3, POSITIONS_3, MASS_3,
    NORMALISER, heads, query_rows, of_row, of_head, of_query,
    tokens_0, row_0, head_0, query_0, columns_0, weight_row_0, weight_column_0, weight_token_0,
    position_row_0, position_head_0, first_0, width_0,
    tokens_1, row_1, head_1, query_1, columns_1, weight_row_1, weight_column_1, weight_token_1,
    position_row_1, position_head_1, first_1, width_1,
    tokens_2, row_2, head_2, query_2, columns_2, weight_row_2, weight_column_2, weight_token_2,
    position_row_2, position_head_2, first_2, width_2,
    tokens_3, row_3, head_3, query_3, columns_3, weight_row_3, weight_column_3, weight_token_3,
    position_row_3, position_head_3, first_3, width_3,
    mass_row, mass_head,
    SCATTERED: tl.constexpr, ADDED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Stores the sums of up to four spans; those whose pointers are None are absent. A program handles some tokens of a span, row
    and KV head. A row and head of MASS has `width` numbers. SCATTERED: a sum is stored at its token's position (`first` + token if
    POSITIONS is None), and hidden tokens are left out. ADDED (with SCATTERED): sums are added to MASS, whose strides are `mass_row`
    and `mass_head`."""
    which, item = tl.program_id(2), tl.program_id(1)
    row, head = (item // heads).to(tl.int64), (item % heads).to(tl.int64)
    NORMALISER += row * of_row + head * of_head
    if which == 0:
        sum_span(
            SCORES_0 + row * row_0 + head * head_0, WEIGHTS_0, POSITIONS_0, MASS_0, NORMALISER,
            item, row, head, query_rows, of_query, tokens_0, query_0, columns_0, weight_row_0, weight_column_0,
            weight_token_0, position_row_0, position_head_0, first_0, width_0, mass_row, mass_head,
            SCATTERED, ADDED, M, BN,
        )  # fmt: skip
    if SCORES_1 is not None:  # noqa: SIM102
        if which == 1:
            sum_span(
                SCORES_1 + row * row_1 + head * head_1, WEIGHTS_1, POSITIONS_1, MASS_1, NORMALISER,
                item, row, head, query_rows, of_query, tokens_1, query_1, columns_1, weight_row_1, weight_column_1,
                weight_token_1, position_row_1, position_head_1, first_1, width_1, mass_row, mass_head,
                SCATTERED, ADDED, M, BN,
            )  # fmt: skip
    if SCORES_2 is not None:  # noqa: SIM102
        if which == 2:
            sum_span(
                SCORES_2 + row * row_2 + head * head_2, WEIGHTS_2, POSITIONS_2, MASS_2, NORMALISER,
                item, row, head, query_rows, of_query, tokens_2, query_2, columns_2, weight_row_2, weight_column_2,
                weight_token_2, position_row_2, position_head_2, first_2, width_2, mass_row, mass_head,
                SCATTERED, ADDED, M, BN,
            )  # fmt: skip
    if SCORES_3 is not None:  # noqa: SIM102
        if which == 3:
            sum_span(
                SCORES_3 + row * row_3 + head * head_3, WEIGHTS_3, POSITIONS_3, MASS_3, NORMALISER,
                item, row, head, query_rows, of_query, tokens_3, query_3, columns_3, weight_row_3, weight_column_3,
                weight_token_3, position_row_3, position_head_3, first_3, width_3, mass_row, mass_head,
                SCATTERED, ADDED, M, BN,
            )  # fmt: skip


@triton.jit
def sum_span(
    SCORES, WEIGHTS, POSITIONS, MASS, NORMALISER, item, row, head, query_rows, of_query, tokens, of_scores, columns, weight_row,
    weight_column, weight_token, position_row, position_head, first_position, width, mass_row, mass_head,
    SCATTERED: tl.constexpr, ADDED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sums one span. Query rows are added in order, `M` at once, so that a row's sums do not depend on the batch."""
    if ADDED:
        MASS += row * mass_row + head * mass_head
    else:
        MASS += item.to(tl.int64) * width
    token = tl.program_id(0) * BN + tl.arange(0, BN)
    there = token < tokens
    mass, largest = tl.zeros([BN], tl.float32), tl.full([BN], float("-inf"), tl.float32)
    for first in range(0, query_rows, M):
        queries = first + tl.arange(0, M)
        inside = (queries < query_rows)[:, None] & there[None, :]
        normaliser = tl.load(NORMALISER + queries * of_query, mask=queries < query_rows, other=0.0)
        scores = tl.load(
            SCORES + queries[:, None].to(tl.int64) * of_scores + token[None, :], mask=inside, other=float("-inf")
        )
        shares = tl.exp2((scores - normaliser[:, None]) * LOG2E)
        if WEIGHTS is not None:
            at = row * weight_row + (queries % columns)[:, None] * weight_column + token[None, :] * weight_token
            shares *= tl.load(WEIGHTS + at, mask=inside, other=0.0)
        mass += tl.sum(shares, 0)
        if SCATTERED:
            largest = tl.maximum(largest, tl.max(scores, 0))
    if SCATTERED:
        position = first_position + token
        if POSITIONS is not None:
            position = tl.load(POSITIONS + row * position_row + head * position_head + token, mask=there, other=0)
        there = there & (largest != float("-inf")) & (position >= 0) & (position < width)
        if ADDED:
            mass += tl.load(MASS + position, mask=there, other=0.0)
        tl.store(MASS + position, mass, mask=there)
    else:
        tl.store(MASS + token, mass, mask=there)


def probability_mass(spans: Sequence[ScoredTokens], normaliser: Tensor) -> list[Tensor]:
    """As `operation.probability_mass`."""
    found = [span.scores.new_empty(*span.scores.shape[:2], span.scores.shape[3]) for span in spans]
    _launch(list(zip(spans, found, strict=True)), normaliser)
    return found


def mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, reach: int) -> Tensor:
    """As `operation.mass_by_position`."""
    found = normaliser.new_empty(*normaliser.shape[:2], reach)
    _launch([(span, found) for span in spans], normaliser, scattered=True)
    return found


def add_mass_by_position(spans: Sequence[ScoredTokens], normaliser: Tensor, mass: Tensor) -> None:
    """As `operation.add_mass_by_position`."""
    _launch([(span, mass) for span in spans], normaliser, scattered=True, added=mass)


def _launch(
    spans: list[tuple[ScoredTokens, Tensor]], normaliser: Tensor, scattered: bool = False, added: Tensor | None = None
) -> None:
    some, (rows, heads, asked, _) = [one for one in spans if one[0].scores.numel()], normaliser.shape
    apart = (0, 0) if added is None else added.stride()[:2]
    for first in range(0, len(some), AT_ONCE):
        own = some[first : first + AT_ONCE]
        absent = AT_ONCE - len(own)
        pointers = [part for span, mass in own for part in (span.scores, span.weights, _numbered(span), mass)]
        numbers = [part for span, mass in own for part in _numbers(span, mass)]
        most = max(span.scores.shape[3] for span, _ in own)
        block = min(16, next_power_of_2(asked))
        with launching_on(normaliser):
            launch(
                sum_rows, (cdiv(most, TOKENS), rows * heads, len(own)),
                *pointers, *[None] * (4 * absent), normaliser, heads, asked, *normaliser.stride()[:3], *numbers,
                *[0] * (12 * absent), *apart, SCATTERED=scattered, ADDED=added is not None, M=block, BN=TOKENS, num_warps=4,
            )  # fmt: skip


def _numbered(span: ScoredTokens) -> Tensor | None:
    return span.positions if isinstance(span.positions, Tensor) else None


def _numbers(span: ScoredTokens, mass: Tensor) -> tuple[int, ...]:
    """Number of tokens, strides of scores, columns, strides of weights and positions, first position, numbers per head of MASS."""
    of_scores, weights, positions = (span.scores.shape[3], *span.scores.stride()[:3]), span.weights, _numbered(span)
    of_weights = (1, 0, 0, 0) if weights is None else (weights.shape[1], *_strides(weights))
    of_positions = (0, 0) if positions is None else _strides(positions)[:2]
    first = span.positions if isinstance(span.positions, int) else 0
    return *of_scores, *of_weights, *of_positions, first, mass.shape[2]


def _strides(part: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else step for size, step in zip(part.shape, part.stride(), strict=True))


def _specialisation(
    spans: int, block: int, weights: str | None = None, numbered: bool = False, added: bool = False
) -> Specialisation:
    absent = [name for name in sum_rows.arg_names if name[-1].isdigit() and int(name[-1]) >= spans]
    constants: dict[str, object] = {name: None if name.isupper() else 0 for name in absent}
    constants |= {} if weights else {f"WEIGHTS_{i}": None for i in range(AT_ONCE)}
    constants |= {f"POSITIONS_{i}": None for i in range(AT_ONCE) if not (numbered and 0 < i < spans)}
    constants |= {"SCATTERED": numbered, "ADDED": added, "M": block, "BN": TOKENS}
    types = {name: "*fp32" if name.isupper() else "i32" for name in sum_rows.arg_names if name not in constants}
    types |= {name: "*i64" if name.endswith("_1") else "*i32" for name in types if name.startswith("POSITIONS")}
    types |= {name: weights for name in types if weights and name.startswith("WEIGHTS")}
    return Specialisation(sum_rows, types, constants, warps=4)


SPECIALISATIONS = {
    "a tier and new tokens, 4 rows": _specialisation(2, 4),
    "weighted, 16 rows": _specialisation(2, 16, "*fp32"),
    "of rows whose query may be a probe": _specialisation(2, 4, "*u8"),
    "pages, window and fetched tokens, by position": _specialisation(3, 4, numbered=True),
    "window and new token, added": _specialisation(2, 4, "*u8", numbered=True, added=True),
}
