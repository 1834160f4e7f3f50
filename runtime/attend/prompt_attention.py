"""Exact causal attention of rows that hold no tokens yet (a prompt), with its log-sum-exp where torch returns it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.runtime.attend.request import AttendRequest

# torch's numbers of the backends that return log-sum-exp, and the multiple of channels that they need on a GPU.
FLASH, CUDNN, CHANNELS = 1, 3, 8


def is_prompt(request: AttendRequest) -> bool:
    """Whether the rows hold no tokens yet and `prompt` computes their attention (no soft cap, no active sliding window)."""
    logits, columns = request.logits, request.given.query.shape[2]
    plain = logits.softcap is None and (logits.sliding is None or columns <= logits.sliding)
    return plain and columns > 1 and not any(request.forward.before[row] for row in request.rows)


def prompt(request: AttendRequest) -> Tensor:
    """Causal attention of the request's new tokens among themselves, `[rows, heads, n, D]` in the query's dtype."""
    return F.scaled_dot_product_attention(*request.given, is_causal=True, scale=request.logits.scale, enable_gqa=True)


def prompt_normalised(request: AttendRequest) -> tuple[Tensor, Tensor | None]:
    """The same output, and the log-sum-exp of every query's logits, float32 `[rows, heads, n]`, which saves a kernel that
    computes probabilities from summing again. None where torch's backend does not return it, or no kernel needs it."""
    (query, keys, values), scale = request.given, request.logits.scale
    backend = _backend(request)
    if backend == CUDNN:  # torch's choice on Hopper
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, True, scale=scale
        )
    elif backend == FLASH and query.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, True, scale=scale)
    elif backend == FLASH:
        group = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, True, scale=scale)
    else:
        return prompt(request), None
    return found[0], found[1].reshape(query.shape[:3])


def _backend(request: AttendRequest) -> int | None:
    """The backend that torch chooses for a prompt; None where log-sum-exp is not available or not needed."""
    query, keys, values = request.given
    kind = query.device.type
    if (
        torch.compiler.is_compiling()
        or any(part.requires_grad for part in request.given)
        or kind not in ("cuda", "cpu")
    ):
        return None
    if not prefers_triton(query.device) or (kind == "cuda" and query.shape[3] % CHANNELS):
        return None
    return torch._fused_sdp_choice(query, keys, values, is_causal=True, scale=request.logits.scale, enable_gqa=True)
