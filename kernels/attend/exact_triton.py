"""Launches `exact_kernel.py`: which exact tokens it meets, and in how many programs."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from calib.kernels.attend.exact_kernel import exact
from calib.kernels.attend.options import EXACT_LAUNCH, block_of, exact_constants, pieces_of
from calib.kernels.attend.packed_pages import Attended, ExactAttention, ExactTokens
from calib.kernels.attend.reference import RunningSoftmax
from calib.kernels.attend.triton import MOST_ROWS, fills, room

GROUPS, PARTS = 3, 4  # of tokens, and of the softmax, that the kernel takes
MOST_CHANNELS = 256
KINDS = (torch.float16, torch.bfloat16, torch.float32)


def supports(query: Tensor, tokens: ExactTokens) -> bool:
    """Whether the kernel meets these tokens: those of one type whose numbers lie side by side, under any mask."""
    held = [part for group in tokens.groups for part in (group.keys, group.values) if part is not None]
    return (
        0 < query.shape[2] <= MOST_ROWS
        and max(query.shape[3], held[-1].shape[3]) <= MOST_CHANNELS
        and len(tokens.groups) <= GROUPS
        and all(group.index is None for group in tokens.groups[1:])
        and held[0].dtype in KINDS
        and all(part.stride(3) == 1 and part.dtype == held[0].dtype and not part.requires_grad for part in held)
        and not query.requires_grad
    )


def attend_exact(
    query: Tensor,
    tokens: ExactTokens,
    parts: Sequence[Attended],
    softcap: float | None,
    scale: float = 1.0,
    told: bool = False,
    dtype: torch.dtype | None = None,
) -> ExactAttention:
    """See `operation.attend_exact`. More parts than `PARTS` are joined before."""
    rows, heads, asked, _ = query.shape
    out = room((rows, heads, asked, tokens.groups[0].values.shape[3]), query, dtype or query.dtype)
    scores = room((rows, heads, asked, tokens.count), query) if told else None
    normaliser = room((rows, heads, asked, 1), query) if told else None
    few = _few(parts)
    held = [tensor for part in few for tensor in _flat(part)]
    mixed_rows, runs = [mixed.stride(0) for mixed in held[2::3]], [part.runs for part in few]
    groups = tokens.groups
    sources = [
        part
        for group in groups
        for part in (group.keys, group.values, None if group.scores is None else group.scores.contiguous())
    ]
    strides = [stride for group in groups for part in (group.keys, group.values) for stride in _strides(part)]
    hidden = None if tokens.hidden is None else tokens.hidden.contiguous().view(torch.uint8)
    columns = 1 if hidden is None else hidden.shape[2]
    of_row, of_head = (0 if hidden is None or hidden.shape[axis] == 1 else hidden.stride(axis) for axis in range(2))
    block = block_of(asked, sized=True)  # a window is short: more programs read it again
    programs = rows * heads * triton.cdiv(asked, block)
    pieces = pieces_of(out.shape[3], block, fills(query.device) // programs) if max(runs, default=1) > 1 else 0
    constants = exact_constants(block, query.shape[3], out.shape[3], groups[0].values.dtype, softcap, pieces)
    exact[(rows * heads, triton.cdiv(asked, block), max(1, pieces))](
        query.contiguous(), hidden, groups[0].index, out, scores, normaliser,
        *_padded(sources, 3 * GROUPS, None), *_padded(held, 3 * PARTS, None),
        scale, heads, asked, columns, of_row, of_head, 0 if hidden is None else hidden.shape[3],
        *_padded([group.values.shape[2] for group in groups], GROUPS, 0),
        0 if groups[0].scores is None else groups[0].scores.shape[3], tokens.count, *_padded(strides, 6 * GROUPS, 0),
        *_padded(mixed_rows, PARTS, 0), *_padded(runs, PARTS, 0), **constants, **EXACT_LAUNCH,
    )  # fmt: skip
    return ExactAttention(out, normaliser, scores)


def _few(parts: Sequence[Attended]) -> list[Attended]:
    if len(parts) <= PARTS:
        return list(parts)
    softmax = RunningSoftmax()
    for part in parts[PARTS - 1 :]:
        softmax.join(part)
    return [*parts[: PARTS - 1], softmax.settled()]


def _flat(part: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Top, mass and mixture by query rows of all heads; a mixture may be some columns of a wider one."""
    mixed = part.mixed.flatten(0, -2)
    return part.top.contiguous(), part.mass.contiguous(), mixed if mixed.stride(1) == 1 else mixed.contiguous()


def _strides(part: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if part is None else part.stride()[:3]


def _padded(found: Sequence[object], count: int, filling: int | None) -> list[object]:
    return [*found, *[filling] * (count - len(found))]
