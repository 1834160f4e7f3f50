"""Launches `token_kernel.py` and `plane_kernel.py`: which groups each supports, and the sizes of tiles.

Both read x `[rows, kv_heads, T, D]` with any strides, apply the `Prologue`, and write words `[rows, kv_heads, n, W]`. The results
equal the reference's bit by bit, so multiplications and additions must not be fused: every launch has `enable_fp_fusion=False`.
"""

from functools import lru_cache

import torch
from torch import Tensor

from calib.kernels.launch import launch
from calib.kernels.pack.reference import words_per_token
from calib.kernels.powers import cdiv, next_power_of_2
from calib.kernels.quantise.plane_kernel import by_planes
from calib.kernels.quantise.prologue import IDENTITY, Prologue
from calib.kernels.quantise.reference import stored_parameters
from calib.kernels.quantise.specialisations import SPECIALISATIONS as SPECIALISATIONS
from calib.kernels.quantise.token_kernel import token_groups

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 512  # most channels
LONGEST = 128  # most tokens of a group per channel, all of which a program holds
TILE = 2048  # values of a plane that a program holds
HELD = 8192  # values of a group's planes that a program holds: 64 registers of a lane


def new_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates an uninitialised result."""
    return torch.empty(*shape, dtype=dtype, device=device)  # faster than with a tuple


def supports(x: Tensor, clip: Tensor | float, prologue: Prologue = IDENTITY) -> bool:
    """Whether the kernels support `x`, `clip` and `prologue`. All bit widths and groups are supported: groups that no kernel can
    measure are measured by torch first."""
    some = x.numel() > 0 and (prologue.order is None or prologue.order.numel() > 0)
    return x.dim() == 4 and x.dtype in DTYPES and x.shape[-1] <= WIDEST and _by_head(clip, x.shape[1]) and some


def _by_head(clip: Tensor | float, heads: int) -> bool:
    return not isinstance(clip, Tensor) or clip.shape in ((heads, 1, 1), (1, 1, 1))


def supports_pair(
    pair: tuple[Tensor, Tensor], group: int, bits: int, clips: tuple[Tensor | float, Tensor | float]
) -> bool:
    """Whether one launch encodes both tensors: same shape, dtype and strides, and groups that are whole planes or divide one."""
    x, other = pair
    return (
        (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
        and (x.stride() == other.stride() or _lie_alike(x, other))
        and supports(x, clips[0])
        and _by_head(clips[1], x.shape[1])
        and _in_planes(group, x.shape[-1], words_per_token(x.shape[-1], bits))
    )


def _lie_alike(x: Tensor, other: Tensor) -> bool:
    return all(size == 1 or x.stride(axis) == other.stride(axis) for axis, size in enumerate(x.shape))


def in_one_pass(x: Tensor, group: tuple[int, int] | None, bits: int, clip: Tensor | float) -> bool:
    """As `operation.encodes_in_one_pass`."""
    measured = group is None or _by_tokens(group, x.shape[-1], bits) or _by_channels(group)
    return supports(x, clip) and measured


def _by_tokens(group: tuple[int, int], width: int, bits: int) -> bool:
    """Whether `token_groups` measures these groups."""
    return group[0] == 1 and _in_planes(group[1], width, words_per_token(width, bits))


def _by_channels(group: tuple[int, int]) -> bool:
    """Whether `by_planes` measures these groups."""
    return group[1] == 1 and group[0] <= LONGEST


def _in_planes(group: int, width: int, runs: int) -> bool:
    return group == width or group % runs == 0 or runs % group == 0


def encode_uniform(
    x: Tensor,
    group: tuple[int, int],
    bits: int,
    clip: Tensor | float,
    parameter_dtype: torch.dtype,
    across_heads: bool = False,
    prologue: Prologue = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """As `operation.encode_uniform`."""
    words = _words(x, bits, prologue)
    (rows, heads, total, _), width = words.shape, x.shape[-1]
    in_planes = _by_tokens(group, width, bits)
    measured = not in_planes and _by_channels(group)
    if across_heads or not (in_planes or measured):
        x, prologue = prologue.forward(x), IDENTITY
        parameters = stored_parameters(x, group, bits, clip, parameter_dtype, across_heads).contiguous()
        _by_planes(x, words, bits, prologue, None, parameters, group, False)
        return words, parameters
    shape = (rows, heads, total // group[0], 2 * width // group[1])
    parameters = new_buffer(shape, dtype=parameter_dtype, device=x.device)
    if measured:
        _by_planes(x, words, bits, prologue, clip, parameters, group, True)
        return words, parameters
    clips, number = _clip(clip, heads)
    _token_groups((*_operands(x, prologue), clips, words, parameters), (None,) * 4, (number, number), group[1], bits)
    return words, parameters


def encode_pair(
    pair: tuple[Tensor, Tensor], group: int, bits: int, clips: tuple[Tensor | float, Tensor | float], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """As `operation.encode_pair`."""
    (x, other), (one, another) = pair, clips
    (rows, heads, total, width), device = x.shape, x.device
    of_words = rows, heads, total, words_per_token(width, bits)
    of_parameters = rows, heads, total, 2 * width // group
    words, others = new_buffer(of_words, torch.int16, device), new_buffer(of_words, torch.int16, device)
    parameters, more = new_buffer(of_parameters, dtype, device), new_buffer(of_parameters, dtype, device)
    (clip, number), (another_clip, another_number) = _clip(one, heads), _clip(another, heads)
    operands = (x, None, None, None, None, clip, words, parameters)
    _token_groups(operands, (other, another_clip, others, more), (number, another_number), group, bits)
    return [(words, parameters), (others, more)]


def encode_fixed(x: Tensor, bits: int, clip: Tensor | float, prologue: Prologue = IDENTITY) -> Tensor:
    """As `operation.encode_fixed`."""
    words = _words(x, bits, prologue)
    _by_planes(x, words, bits, prologue, clip, None, (1, x.shape[-1]), False)
    return words


def _words(x: Tensor, bits: int, prologue: Prologue) -> Tensor:
    """Allocates the words."""
    total = x.shape[2] if prologue.order is None else prologue.order.shape[-1]
    return new_buffer((*x.shape[:2], total, words_per_token(x.shape[-1], bits)), dtype=torch.int16, device=x.device)


def _operands(x: Tensor, prologue: Prologue) -> tuple[Tensor | None, ...]:
    """Arguments x, order, center, half and balance of the kernels, the last three expanded to all rows and heads."""
    if prologue is IDENTITY:
        return x, None, None, None, None
    rows, heads, _, width = x.shape
    numbers = (prologue.center, prologue.half, prologue.balance)
    spread = (None if part is None else part.expand(rows, heads, 1, width).contiguous() for part in numbers)
    return x, None if prologue.order is None else prologue.order.contiguous(), *spread


def _clip(clip: Tensor | float | None, heads: int) -> tuple[Tensor | None, float]:
    """Clip as a tensor with a number per head, or None and the common number."""
    if isinstance(clip, Tensor):
        return clip.expand(heads, 1, 1).contiguous(), 1.0
    return None, 0.0 if clip is None else float(clip)


def _token_groups(
    operands: tuple[Tensor | None, ...],
    others: tuple[Tensor | None, ...],
    clips: tuple[float, float],
    group: int,
    bits: int,
) -> None:
    """Launches `token_groups`. `operands`: x, prologue, clip, words, parameters; `others`: x, clip, words, parameters of the second
    tensor of a pair, or None."""
    x, words = operands[0], operands[6]
    assert x is not None and words is not None
    (rows, heads, total, runs), width = words.shape, x.shape[-1]
    tokens, constants = _of_groups(width, bits, runs, group)
    ratio = 2 / (2**bits - 1)
    launch(
        token_groups, (cdiv(total, tokens), heads, rows * (1 if others[0] is None else 2)),
        *operands, *others, clips[0] * ratio, clips[1] * ratio, total, rows, *x.stride(), **constants, enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache
def _of_groups(width: int, bits: int, runs: int, group: int) -> tuple[int, dict[str, int]]:
    """Tokens of a program, and the constants of `token_groups`."""
    run = min(runs, group)
    up = {"RUNS_UP": next_power_of_2(runs // run), "RUN_UP": next_power_of_2(run)}
    cells, span = up["RUNS_UP"] * up["RUN_UP"], cdiv(group, runs)
    tokens = min(_tokens(cells), max(1, HELD // (cells * next_power_of_2(span))))
    sizes = {"D": width, "BITS": bits, "W": runs, "SPAN": span, "RUNS": runs // run, "RUN": run}
    return tokens, sizes | {"TOKENS": tokens} | up


def _by_planes(
    x: Tensor,
    words: Tensor,
    bits: int,
    prologue: Prologue,
    clip: Tensor | float | None,
    parameters: Tensor | None,
    group: tuple[int, int],
    measured: bool,
) -> None:
    (rows, heads, total, runs), width = words.shape, x.shape[-1]
    clips, number = _clip(clip, heads)
    ratio = 2 / (2**bits - 1)
    # As in the reference, the product of clip and ratio is rounded to float32 for calibrated ranges; for measured ones with a
    # common clip it is computed in float64.
    bound, ratio = (number, number * ratio) if measured and clips is None else (number, ratio)
    up = next_power_of_2(runs)
    tokens = next_power_of_2(group[0]) if measured else _tokens(up)
    step = group[0] if measured else tokens
    wide = next_power_of_2(width) if measured else 1
    p_row, p_head = 0, 0
    if parameters is not None:
        p_head = parameters.shape[2]
        p_row = parameters.shape[1] * p_head
        if parameters.shape[1] == 1:  # across heads
            p_head = 0
    launch(
        by_planes, (cdiv(total, step), heads, rows),
        *_operands(x, prologue), clips, words, parameters, bound, ratio, p_row, p_head, step, group[0], total, *x.stride(),
        width, bits, runs, group[1], measured, tokens, up, wide,
        num_warps=max(1, min(8, tokens * wide // 4096)) if measured else 4, enable_fp_fusion=False,
    )  # fmt: skip


def _tokens(cells: int) -> int:
    """Tokens of a tile with `cells` values each."""
    return max(1, min(LONGEST, TILE // cells))
