"""Launches `exact_kernel.py`: which exact tokens it supports, and how the work is split into programs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from calib.kernels.attend.exact_kernel import exact
from calib.kernels.attend.options import block_of, exact_constants, exact_launch, pieces_of
from calib.kernels.attend.packed_pages import Attended, ExactAttention, ExactTokens
from calib.kernels.attend.page_launch import strides_of
from calib.kernels.attend.reference import RunningSoftmax
from calib.kernels.attend.triton import MOST_ROWS, fills, room
from calib.kernels.early_launch import begins_early, early_launch
from calib.kernels.launch import launch
from calib.kernels.powers import cdiv

GROUPS, PARTS = 3, 4  # most groups of tokens, and most parts of the softmax, of a launch
MOST_CHANNELS = 256
MOST_OFFSET = 2**31  # of a token from the first one of its head, which the kernel computes in 32 bits
KINDS = (torch.float16, torch.bfloat16, torch.float32)


def supports(query: Tensor, tokens: ExactTokens) -> bool:
    """Whether the kernel supports these tokens: one dtype, contiguous channels, offsets in 32 bits, any mask, no gradient."""
    groups = tokens.groups
    kind, channels = groups[0].values.dtype, max(query.shape[3], groups[-1].values.shape[3])
    if kind not in KINDS or len(groups) > GROUPS or channels > MOST_CHANNELS or not 0 < query.shape[2] <= MOST_ROWS:
        return False
    for group in groups:
        if group.index is not None and group is not groups[0]:
            return False
        for part in (group.keys, group.values):
            if part is None:
                continue
            *_, token, channel = part.stride()
            if part.dtype != kind or channel != 1 or part.requires_grad or part.shape[2] * token >= MOST_OFFSET:
                return False
    return not query.requires_grad


def attend_exact(
    query: Tensor,
    tokens: ExactTokens,
    parts: Sequence[Attended],
    softcap: float | None,
    scale: float = 1.0,
    told: bool = False,
    dtype: torch.dtype | None = None,
) -> ExactAttention:
    """As `operation.attend_exact`. If there are more than `PARTS` parts, those from the `PARTS`-th on are merged before."""
    (rows, heads, asked, _), device = query.shape, query.device
    groups, kind, wide = tokens.groups, tokens.groups[0].values.dtype, tokens.groups[0].values.shape[3]
    out = room((rows, heads, asked, wide), device, dtype or query.dtype)
    count = sum([group.values.shape[2] for group in groups])
    scores = room((rows, heads, asked, count), device) if told else None
    normaliser = room((rows, heads, asked, 1), device) if told else None
    held, mixed_rows, runs = list[Tensor | None](), list[int](), list[int]()
    for part in _few(parts):
        mixed, row = part.mixed, part.mixed.shape[-1]
        if not mixed.is_contiguous():  # a slice of columns needs no copy if its rows have one stride
            mixed = mixed.flatten(0, -2)
            mixed = mixed if mixed.stride(1) == 1 else mixed.contiguous()
            row = mixed.stride(0)
        held += part.top.contiguous(), part.mass.contiguous(), mixed
        mixed_rows.append(row)
        runs.append(part.runs)
    sources, counts, strides = list[Tensor | None](), list[int](), list[int]()
    for group in groups:
        sources += group.keys, group.values, None if group.scores is None else group.scores.contiguous()
        strides += (0, 0, 0) if group.keys is None else group.keys.stride()[:3]
        strides += group.values.stride()[:3]
        counts.append(group.values.shape[2])
    no_groups, no_parts = GROUPS - len(groups), PARTS - len(runs)  # absent ones
    hidden = None if tokens.hidden is None else tokens.hidden.contiguous().view(torch.uint8)
    columns = 1 if hidden is None else hidden.shape[2]
    of_row, of_head = (0, 0) if hidden is None else strides_of(hidden)
    of_row = 0 if hidden is None or hidden.shape[0] == 1 else of_row
    block = block_of(asked, few=True)  # a window is short, so that several programs may read it
    blocks = cdiv(asked, block)
    pieces = pieces_of(wide, block, fills(device) // (rows * heads * blocks)) if max(runs, default=1) > 1 else 0
    constants = exact_constants(block, query.shape[3], wide, kind, softcap, pieces)
    # An early start needs a kernel between this one and those that wrote its inputs: without parts there may be none, and copies
    # of the query or the mask are written directly before.
    copied = any(part is not None and not part.is_contiguous() for part in (query, tokens.hidden))
    early = bool(parts) and not copied and begins_early(device)
    launch(
        exact, (rows * heads, blocks, max(1, pieces)),
        query.contiguous(), hidden, groups[0].index, out, scores, normaliser,
        *sources, *(None,) * (3 * no_groups), *held, *(None,) * (3 * no_parts),
        scale, heads, asked, columns, of_row, of_head, 0 if hidden is None else hidden.shape[3],
        *counts, *(0,) * no_groups, 0 if groups[0].scores is None else groups[0].scores.shape[3], count,
        *strides, *(0,) * (6 * no_groups), *mixed_rows, *(0,) * no_parts, *runs, *(0,) * no_parts,
        **constants, **exact_launch(block, wide, kind, pieces), EARLY=early, **early_launch(early),
    )  # fmt: skip
    return ExactAttention(out, normaliser, scores)


def _few(parts: Sequence[Attended]) -> Sequence[Attended]:
    if len(parts) <= PARTS:
        return parts
    softmax = RunningSoftmax()
    for part in parts[PARTS - 1 :]:
        softmax.join(part)
    return [*parts[: PARTS - 1], softmax.settled()]
