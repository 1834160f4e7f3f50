"""Launches the kernels for lists of whole segments (`RowLists`): which lists they support, grids and scratch memory."""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch
from calib.kernels.outliers.list_mixture_kernel import list_mixtures
from calib.kernels.outliers.list_score_kernel import list_scores
from calib.kernels.outliers.row_lists import LANES, RowLists, span_of

# Most query rows of a program, tokens of a tile of scores, and least tiles of a program.
ROWS, TOKENS, TILES = 16, 32, 4

# Programs of the score kernel per multiprocessor, each of one warp, which needs no barriers. Stretches that a program of the
# mixture kernel handles at once, a warp each: attention starts eight programs, and the weights of more would not fit the cache.
PROGRAMS, STRETCHES = 32, 2


def supports(lists: RowLists) -> bool:
    """Whether the kernels support these lists: contiguous entries, delta float16 or float32, index uint8 or int16."""
    held = (lists.delta, lists.index, lists.starts, *([] if lists.begins is None else [lists.begins]))
    if any(part.stride(-1) != 1 and part.shape[-1] > 1 for part in held):
        return False
    return lists.delta.dtype in (torch.float16, torch.float32) and lists.index.dtype in (torch.uint8, torch.int16)


def scores_of(
    query: Tensor, lists: RowLists, used: Tensor, slots: int, scale: float, map_scale: Tensor | None
) -> Tensor:
    """`operation.scores_of` for lists of whole segments of keys."""
    rows, heads, asked, channels = query.shape
    assert lists.begins is not None, "lists of values"
    constants = score_constants(asked, channels)
    blocks, tiles = triton.cdiv(asked, constants["M"]), triton.cdiv(slots, TOKENS)
    programs = PROGRAMS * multiprocessors(query.device) // (rows * heads * blocks)
    run = max(TILES, triton.cdiv(tiles, max(1, programs)))
    grid = (triton.cdiv(tiles, run), rows * heads, blocks)
    bias = torch.empty((rows, heads, asked, slots), dtype=torch.float32, device=query.device)
    launch(
        list_scores, grid,
        query.contiguous(), map_scale, used.contiguous(), lists.records, lists.delta, lists.index, lists.starts, lists.begins,
        _room(grid, constants["DP"] * constants["M"], query.device), bias,
        scale, heads, asked, slots, lists.first, run, lists.delta.shape[-1],
        *scale_strides(map_scale), lists.delta.stride(0), *lists.starts.stride()[:2], *lists.begins.stride()[:2],
        **constants, num_warps=1, num_stages=1,
    )  # fmt: skip
    return bias


def add_to_mixtures(
    parts: tuple[Tensor, Tensor],
    scores: Tensor,
    lists: RowLists,
    vectors: Tensor | None,
    used: Tensor,
    page: int,
    run: int,
    turn: int,
    channels: int,
    map_scale: Tensor | None,
) -> None:
    """`triton.add_to_mixtures` for lists of whole segments of values."""
    top, mixed = parts
    rows, heads, splits, asked = top.shape
    ranked = 0 if vectors is None else vectors.shape[2]
    constants = mixture_constants(asked, channels, ranked, mixed.shape[-1], page, turn)
    grid = (splits, rows * heads, triton.cdiv(asked, constants["M"]))
    held = STRETCHES * (constants["SPAN"] + constants["DP"] + LANES) * constants["M"]
    launch(
        list_mixtures, grid,
        scores, map_scale, used.contiguous(), lists.records, lists.delta, lists.index, lists.starts, vectors,
        top, _room(grid, held, mixed.device), mixed,
        heads, asked, scores.shape[-1], lists.first, run * turn,
        *scale_strides(map_scale), lists.delta.stride(0), *lists.starts.stride()[:2], *vector_strides(vectors),
        **constants, num_warps=STRETCHES, num_stages=1,
    )  # fmt: skip


def score_constants(asked: int, channels: int) -> dict[str, int]:
    """Constants of `list_scores`."""
    return {"D": channels, "DP": _padded(channels), "M": _block(asked), "BN": TOKENS, "SPAN": span_of(channels)}


def mixture_constants(asked: int, channels: int, ranked: int, columns: int, page: int, turn: int) -> dict[str, int]:
    """Constants of `list_mixtures`; a part consists of whole turns of `turn` tokens."""
    sizes = {"D": channels, "DP": _padded(channels), "M": _block(asked), "SPAN": span_of(channels), "LANES": LANES}
    return sizes | {
        "STRETCHES": STRETCHES,
        "RANKED": ranked,
        "COLUMNS": columns,
        "PAGE": page,
        "PADDED": triton.cdiv(page, turn) * turn,
    }


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 8 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    """Row, head and channel strides; 0 along axes of size 1."""
    if scale is None:
        return 0, 0, 0
    return tuple(0 if scale.ndim < axis or scale.shape[-axis] == 1 else scale.stride(-axis) for axis in (4, 3, 1))


def vector_strides(vectors: Tensor | None) -> tuple[int, int]:
    """Row and head strides of vectors; 0 for rows if all share them."""
    return (0, 0) if vectors is None else (0 if vectors.shape[0] == 1 else vectors.stride(0), vectors.stride(1))


def _block(asked: int) -> int:
    return min(ROWS, triton.next_power_of_2(asked))


def _padded(channels: int) -> int:
    return triton.next_power_of_2(channels)


def _room(grid: tuple[int, int, int], each: int, device: torch.device) -> Tensor:
    """Scratch memory: `each` float32 numbers for every program."""
    return torch.empty(grid[0] * grid[1] * grid[2] * each, dtype=torch.float32, device=device)


def _compiled(
    kernel: object, constants: dict[str, object], warps: int, codes: int, most: float, spilled: int = 0
) -> Specialisation:
    """Specialisation without a map, with at most `most` instructions for each of `codes` elements in an iteration of the longest
    loop."""
    constants |= {"SCALE": None}
    names = [name for name in kernel.arg_names if name not in constants]  # type: ignore[attr-defined]
    strides = ("_record", "_head", "_row")
    types = {name: "*fp32" if name.isupper() else "i32:16" if name.endswith(strides) else "i32" for name in names}
    types |= {"query_scale": "fp32"} if "query_scale" in names else {}
    held = {"QUERY": "*bf16", "DELTA": "*fp16", "USED": "*i32", "RECORDS": "*i32", "STARTS": "*i32", "BEGINS": "*i16"}
    held |= {"VECTORS": "*fp16", "INDEX": "*u8" if "BEGINS" in names else "*i16"}
    types |= {name: kind for name, kind in held.items() if name in names}
    return Specialisation(kernel, types, constants, warps, 1, codes, most, spilled=spilled)


def _scores(most: float, asked: int = 4, channels: int = 128) -> Specialisation:
    """Specialisation of `list_scores`; costs are per element of tiles in which no token has more than `AT_ONCE` outliers."""
    return _compiled(list_scores, dict(score_constants(asked, channels)), 1, TOKENS * channels, most)


def _mixtures(most: float, asked: int = 4, channels: int = 128, ranked: int = 4, spilled: int = 0) -> Specialisation:
    """Specialisation of `list_mixtures`; costs are per element of stretches in which no lane has more than `AT_ONCE` outliers."""
    constants = mixture_constants(asked, channels, ranked, channels + ranked, 64, 64)
    codes = STRETCHES * constants["SPAN"] * channels
    return _compiled(list_mixtures, dict(constants), STRETCHES, codes, most, spilled)


SPECIALISATIONS = {
    "scores, lists of rows": _scores(1.7),
    "scores, lists of rows, 1 row": _scores(1.25, 1),
    "scores, lists of rows, 16 rows": _scores(4.7, ROWS),
    "scores, lists of rows, 256 channels": _scores(0.85, channels=256),
    "mixtures, lists of rows, rank 4": _mixtures(0.65),
    "mixtures, lists of rows": _mixtures(0.69, ranked=0, spilled=8),
    "mixtures, lists of rows, 1 row": _mixtures(0.36, 1),
    "mixtures, lists of rows, 16 rows": _mixtures(1.95, ROWS),
    "mixtures, lists of rows, 256 channels": _mixtures(0.49, channels=256),
}
