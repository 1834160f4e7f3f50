"""Specialisations of the quantisation kernels that are compiled without a GPU."""

from typing import Any

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.pack.reference import words_per_token
from calib.kernels.quantise.plane_kernel import by_planes
from calib.kernels.quantise.token_kernel import token_groups


def _specialisation(
    kernel: Any, bits: int, dtype: str, most: float, constants: dict[str, Any], warps: int = 4, **own: str
) -> Specialisation:
    """Specialisation of a kernel for 128 channels, which takes at most `most` instructions a code."""
    types = dict.fromkeys(("total", "rows", "step", "group", "p_row", "p_head"), "i32")
    types |= dict.fromkeys(("s_row", "s_head", "s_token"), "i32:16")
    types |= dict.fromkeys(("ratio", "ratio_1", "bound"), "fp32")
    types |= {"x": f"*{dtype}", "words": "*i16", "parameters": "*fp16", **own}
    runs = words_per_token(128, bits)
    absent = {"order", "center", "half", "balance", "clip"}
    absent |= {"x_1", "clip_1", "words_1", "parameters_1"} if kernel is token_groups else set()
    arguments: dict[str, Any] = dict.fromkeys(absent - types.keys()) | constants
    arguments |= {"s_channel": 1, "D": 128, "BITS": bits, "W": runs}
    # With two tensors the kernel has its code twice, and a program runs one half.
    codes = constants["TOKENS"] * 128 * (2 if "x_1" in own else 1)
    return Specialisation(kernel, types, arguments, warps, codes=codes, most=most, fusion=False)


_TOKEN = {"RUNS": 1, "RUNS_UP": 1}
_PLANES = {"COLUMN": 1, "MEASURED": True, "D_UP": 128}
SPECIALISATIONS = {
    "2 bit, values of KIVI (1, 32)": _specialisation(
        token_groups, 2, "fp16", 14.1, {**_TOKEN, "SPAN": 2, "RUN": 16, "RUN_UP": 16, "TOKENS": 128},
    ),
    "4 bit, values of KIVI (1, 32)": _specialisation(
        token_groups, 4, "bf16", 17.1, {**_TOKEN, "SPAN": 1, "RUN": 32, "RUN_UP": 32, "TOKENS": 64},
    ),
    "4 bit, a token (1, 128)": _specialisation(
        token_groups, 4, "bf16", 14.4, {**_TOKEN, "SPAN": 4, "RUN": 32, "RUN_UP": 32, "TOKENS": 64},
    ),
    "4 bit, a token over scales of channels": _specialisation(
        token_groups, 4, "bf16", 19.5, {**_TOKEN, "SPAN": 4, "RUN": 32, "RUN_UP": 32, "TOKENS": 64}, half="*fp16",
    ),
    "4 bit, tokens of both streams (1, 128)": _specialisation(
        token_groups, 4, "bf16", 14.4, {**_TOKEN, "SPAN": 4, "RUN": 32, "RUN_UP": 32, "TOKENS": 64},
        x_1="*bf16", words_1="*i16", parameters_1="*fp16",
    ),
    "2 bit, keys of KIVI (32, 1)": _specialisation(
        by_planes, 2, "bf16", 19.4, {**_PLANES, "W_UP": 16, "TOKENS": 32}, warps=1
    ),
    "2 bit, keys of KIVI (128, 1)": _specialisation(by_planes, 2, "bf16", 20.4, {**_PLANES, "W_UP": 16, "TOKENS": 128}),
    "4 bit, keys of KIVI (32, 1)": _specialisation(
        by_planes, 4, "bf16", 18.2, {**_PLANES, "W_UP": 32, "TOKENS": 32}, warps=1
    ),
    "4 bit, calibrated, in order": _specialisation(
        by_planes, 4, "bf16", 22.5, {"COLUMN": 128, "MEASURED": False, "D_UP": 1, "parameters": None, "W_UP": 32, "TOKENS": 64},
        order="*i64", center="*fp16", half="*fp16", clip="*fp32",
    ),
}  # fmt: skip
