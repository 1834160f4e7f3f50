"""Calls `exact.c`: attention of a few query rows over exact tokens, merged with other parts of a softmax, on a CPU."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import Attended, ExactAttention, ExactTokens
from calib.kernels.compiled import library_of_rows
from calib.kernels.dispatch import prefers_compiled

SOURCE = Path(__file__).with_name("exact.c")
GROUPS, MOST_PARTS, MOST_ROWS, MOST_CHANNELS = 3, 16, 8, 512  # as in exact.c
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Group(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("key_row", "key_head", "key_token", "value_row", "value_head", "value_token")
        ),
        ("tokens", ctypes.c_int32),
        ("scored", ctypes.c_int32),
    )


class _Asked(ctypes.Structure):
    _fields_ = (
        ("groups", _Group * GROUPS),
        *((name, ctypes.c_void_p * MOST_PARTS) for name in ("top", "mass", "mixed")),
        ("query", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("hidden_row", ctypes.c_int64),
        ("hidden_head", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("told", ctypes.c_void_p),
        ("normaliser", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "key_dim", "value_dim", "parts", "kind")),
        ("softcap", ctypes.c_float),
    )


def supports(query: Tensor, tokens: ExactTokens) -> bool:
    """Whether `attend_exact` supports these tokens: float32, bfloat16 or float16, contiguous channels, a contiguous mask for one
    query column, no gradient."""
    held = [part for group in tokens.groups for part in (group.keys, group.values) if part is not None]
    hidden = tokens.hidden
    return (
        prefers_compiled(query.device)
        and 0 < query.shape[2] <= MOST_ROWS
        and max(query.shape[3], held[-1].shape[3]) <= MOST_CHANNELS
        and len(tokens.groups) <= GROUPS
        and held[0].dtype in KINDS
        and (hidden is None or (hidden.shape[2] == 1 and hidden.is_contiguous()))
        and all(type(part) is Tensor and part.stride(3) == 1 and not part.requires_grad for part in (query, *held))
        and library_of_rows(SOURCE, query.shape[2]) is not None
    )


def attend_exact(
    query: Tensor, tokens: ExactTokens, parts: Sequence[Attended], softcap: float | None, told: bool = False
) -> ExactAttention:
    """As `operation.attend_exact`, with `query` in float32 and already scaled."""
    rows, heads, asked, key_dim = query.shape
    out = query.new_empty(rows, heads, asked, tokens.groups[0].values.shape[3])
    kept = [query.contiguous(), *(part.contiguous() for own in parts for part in (own.top, own.mass, own.mixed))]
    request = _Asked(
        query=_at(kept[0]), out=_at(out), rows=rows, heads=heads, key_dim=key_dim, value_dim=out.shape[3], parts=len(parts),
        kind=KINDS[tokens.groups[0].values.dtype], softcap=softcap or 0.0,
    )  # fmt: skip
    for number, group in enumerate(tokens.groups):
        of_keys = (0, 0, 0) if group.keys is None else group.keys.stride()[:3]
        at = (None if part is None else _at(part) for part in (group.keys, group.values, group.scores, group.index))
        scored = 0 if group.scores is None else group.scores.shape[3]
        request.groups[number] = _Group(*at, *of_keys, *group.values.stride()[:3], group.values.shape[2], scored)
    for number, (top, mass, mixed) in enumerate(zip(*(kept[first::3] for first in (1, 2, 3)), strict=True)):
        request.top[number], request.mass[number], request.mixed[number] = map(_at, (top, mass, mixed))
    if tokens.hidden is not None:
        request.hidden = _at(tokens.hidden)
        strides = (0 if tokens.hidden.shape[axis] == 1 else tokens.hidden.stride(axis) for axis in range(2))
        request.hidden_row, request.hidden_head = strides
    scores = query.new_empty(rows, heads, asked, tokens.count) if told else None
    normaliser = query.new_empty(rows, heads, asked, 1) if told else None
    if scores is not None and normaliser is not None:
        request.told, request.normaliser = _at(scores), _at(normaliser)
    if _function(asked)(request, torch.get_num_threads()):
        raise MemoryError("no memory for the scores of exact tokens")
    return ExactAttention(out, normaliser, scores)


def _at(part: Tensor) -> int:
    return part.data_ptr()


@cache
def _function(rows: int) -> Any:
    found = library_of_rows(SOURCE, rows)
    assert found is not None
    found.attend_exact.argtypes = [ctypes.POINTER(_Asked), ctypes.c_int]
    found.attend_exact.restype = ctypes.c_int
    return found.attend_exact
