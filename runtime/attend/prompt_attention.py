"""Exact causal attention of rows that hold nothing yet, and what it knows of their probabilities."""

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.runtime.attend.request import AttendRequest

# What torch calls the backend that gives the sums of its rows back, and how many channels that takes at a time on a GPU.
FLASH, CHANNELS = 1, 8


def is_prompt(request: AttendRequest) -> bool:
    """Whether the rows hold nothing yet and `prompt` is their attention."""
    logits, columns = request.logits, request.given.query.shape[2]
    plain = logits.softcap is None and (logits.sliding is None or columns <= logits.sliding)
    return plain and columns > 1 and not any(request.forward.before[row] for row in request.rows)


def prompt(request: AttendRequest) -> Tensor:
    """`[rows, heads, n, D]` in the query's dtype."""
    return F.scaled_dot_product_attention(*request.given, is_causal=True, scale=request.logits.scale, enable_gqa=True)


def prompt_normalised(request: AttendRequest) -> tuple[Tensor, Tensor | None]:
    """The same output, and the logarithm of every query row's sum of exponentials, float32 `[rows, heads, n]`: a kernel that makes
    probabilities need not sum them up again. None where the backend that torch chooses does not give it back, or no kernel asks."""
    (query, keys, values), scale = request.given, request.logits.scale
    if torch.compiler.is_compiling() or any(part.requires_grad for part in request.given) or not _by_flash(request):
        return prompt(request), None
    if query.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, True, scale=scale)
    else:
        group = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, True, scale=scale)
    return found[0], found[1]


def _by_flash(request: AttendRequest) -> bool:
    query, keys, values = request.given
    kind = query.device.type
    if (
        not prefers_triton(query.device)
        or kind not in ("cuda", "cpu")
        or (kind == "cuda" and query.shape[3] % CHANNELS)
    ):
        return False
    chosen = torch._fused_sdp_choice(query, keys, values, is_causal=True, scale=request.logits.scale, enable_gqa=True)
    return bool(chosen == FLASH)
