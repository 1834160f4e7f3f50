"""Undoes RoPE of keys in one launch: keys are read once, in their dtype, and written once, in float32.

Results equal the reference's bit by bit, so multiplications and additions must not be fused: `enable_fp_fusion=False`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
TILE = 2048  # channel pairs of a program


@triton.jit(do_not_specialize=["total"])
def turn_back(
    x, COS, SIN, UNROTATED, total, s_row, s_head, s_token, s_turn,
    D: tl.constexpr, HALF: tl.constexpr, HALF_UP: tl.constexpr, REST_UP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Stores UNROTATED; a program handles some tokens of a row and head. Channels from 2 HALF on are copied. `s_turn`: stride of
    rows in COS and SIN, 0 if all rows share them."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    x += row * s_row + head * s_head + token * s_token
    UNROTATED += ((row * tl.num_programs(1) + head) * total + token) * D
    COS, SIN = COS + row * s_turn, SIN + row * s_turn
    pair = tl.arange(0, HALF_UP)[None, :]
    there = (token < total) & (pair < HALF)
    first = tl.load(x + pair, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + pair, mask=there, other=0.0).to(tl.float32)
    cos = tl.load(COS + token * HALF + pair, mask=there, other=0.0)
    back = -tl.load(SIN + token * HALF + pair, mask=there, other=0.0)
    tl.store(UNROTATED + pair, first * cos - second * back, mask=there)
    tl.store(UNROTATED + HALF + pair, second * cos + first * back, mask=there)
    if D > 2 * HALF:
        channel = 2 * HALF + tl.arange(0, REST_UP)[None, :]
        there = (token < total) & (channel < D)
        tl.store(UNROTATED + channel, tl.load(x + channel, mask=there, other=0.0).to(tl.float32), mask=there)


def supports(keys: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel supports these: contiguous channels and angles, and at least one rotated pair."""
    together = keys.stride(3) == 1 and cos.is_contiguous() and sin.is_contiguous()
    return keys.dtype in DTYPES and cos.dim() in (2, 3) and together and cos.shape[-1] > 0


def unrotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `operation.unrotated`."""
    rows, heads, total, _ = keys.shape
    found = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    if found.numel():
        known = _constants(keys.shape[3], cos.shape[-1])
        with torch.cuda.device_of(keys):
            launch(
                turn_back,
                (triton.cdiv(total, known["TOKENS"]), heads, rows),
                keys,
                cos,
                sin,
                found,
                total,
                *keys.stride()[:3],
                cos.stride(0) if cos.dim() == 3 else 0,
                **known,
                enable_fp_fusion=False,
            )
    return found


def _constants(width: int, half: int) -> dict[str, int]:
    up = triton.next_power_of_2(half)
    rest = triton.next_power_of_2(max(1, width - 2 * half))
    return {"D": width, "HALF": half, "HALF_UP": up, "REST_UP": rest, "TOKENS": max(1, TILE // max(up, rest))}


def _specialisation(dtype: torch.dtype, width: int, half: int) -> Specialisation:
    types = {"x": f"*{DTYPES[dtype]}", "COS": "*fp32", "SIN": "*fp32", "UNROTATED": "*fp32", "total": "i32"}
    types |= dict.fromkeys(("s_row", "s_head", "s_token", "s_turn"), "i32:16")
    return Specialisation(turn_back, types, _constants(width, half), fusion=False)


SPECIALISATIONS = {
    "all channels": _specialisation(torch.bfloat16, 128, 64),
    "a part of them": _specialisation(torch.float16, 96, 12),
}
