"""Launches the kernels for outliers and low-rank terms: which terms they support, grids and scratch memory."""

from dataclasses import replace
from math import inf

import torch
import triton
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch
from calib.kernels.outliers import list_triton
from calib.kernels.outliers.list_triton import scale_strides, vector_strides
from calib.kernels.outliers.mixture_kernel import mixture_terms
from calib.kernels.outliers.page_terms import PageTerms
from calib.kernels.outliers.score_kernel import score_terms

# Query rows of a program, tokens of a tile, least tiles of a program of scores; most coefficients of a token, most channels.
ROWS, TOKENS, TILES, MOST_RANK, MOST_CHANNELS = (8, 16), 32, 4, 16, 256

# Tokens of a tile of mixtures with 128 channels, and programs per multiprocessor: their scratch memory must stay in its cache,
# which also provides their shared memory.
MIXED_TOKENS, PROGRAMS = 64, 8

FLOATS = (torch.float16, torch.float32)
INDICES = (torch.uint8, torch.int16, torch.int32)


def supports(terms: PageTerms, channels: int) -> bool:
    """Whether the kernels support these terms: contiguous entries and coefficients, at most `MOST_CHANNELS` channels, `MOST_RANK`
    coefficients, float16 or float32 numbers, and indices uint8, int16 or int32."""
    if terms.lists is not None and not list_triton.supports(terms.lists):
        return False
    held = [part for part in (terms.delta, terms.index, terms.coefficients, terms.basis) if part is not None]
    numbers = [part for part in (terms.delta, terms.coefficients, terms.basis) if part is not None]
    return (
        0 < channels <= MOST_CHANNELS
        and terms.rank <= MOST_RANK
        and all(map(_by_token, held))
        and all(part.dtype in FLOATS for part in numbers)
        and (terms.index is None or terms.index.dtype in INDICES)
    )


def _programs(device: torch.device) -> int:
    """Programs that fill the device. Each needs scratch memory, so no more are started, but at least one per head and row block."""
    return PROGRAMS * list_triton.multiprocessors(device)


def _by_token(pages: Tensor) -> bool:
    (_, _, rows, width), (_, _, row, number) = pages.shape, pages.stride()
    return (rows == 1 or row == width) and (width == 1 or number == 1)


def _strides(part: Tensor | None) -> tuple[int, int]:
    """Strides of the first axis (pages or rows) and of heads; the latter is 0 if all heads share the numbers."""
    return (0, 0) if part is None else (part.stride(0), 0 if part.shape[1] == 1 else part.stride(1))


def _block(query_rows: int) -> int:
    return ROWS[0] if query_rows <= ROWS[0] else ROWS[1]


def _warps(channels: int, block: int, tokens: int) -> int:
    """Warps of a program: more where a tile's matrix needs their registers."""
    return 2 if channels <= MOST_CHANNELS // 2 and block == ROWS[0] and tokens <= TOKENS else 4


def _padded(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def score_constants(terms: PageTerms, block: int, channels: int, page: int) -> dict[str, object]:
    """Constants of `score_terms`."""
    found: dict[str, object] = {"LISTED": terms.listed, "ACROSS": terms.across, "RANK": terms.rank}
    return found | {"D": channels, "DP": _padded(channels), "M": block, "BN": TOKENS, "PAGE": page}


def scores_of(
    query: Tensor,
    terms: PageTerms,
    table: Tensor,
    used: Tensor,
    page: int,
    scale: float,
    map_scale: Tensor | None,
) -> Tensor:
    """As `operation.scores_of`."""
    if terms.lists is not None:
        return list_triton.scores_of(query, terms.lists, used, table.shape[1] * page, scale, map_scale)
    rows, heads, asked, channels = query.shape
    slots, tiles = table.shape[1] * page, triton.cdiv(page, TOKENS)
    wide = 0 if terms.delta is None else terms.delta.shape[-1] // (channels if terms.listed else 1)
    block = _block(asked)
    lines = rows * heads * triton.cdiv(asked, block)
    run = max(TILES, triton.cdiv(table.shape[1] * tiles, max(1, _programs(query.device) // lines)))
    if terms.listed:  # whole pages
        run = tiles * triton.cdiv(run, tiles)
    grid = (triton.cdiv(table.shape[1] * tiles, run), rows * heads, triton.cdiv(asked, block))
    placed = _pieces(grid, terms, channels, TOKENS) if terms.listed else None
    bias = torch.empty((rows, heads, asked, slots), dtype=torch.float32, device=query.device)
    launch(
        score_terms, grid,
        query.contiguous(), map_scale, table, used.contiguous(), terms.delta, terms.index,
        terms.coefficients, terms.basis, placed, bias,
        scale, heads, asked, slots, table.stride(0), run, wide,
        *scale_strides(map_scale), *_strides(terms.delta), *_strides(terms.coefficients), *_strides(terms.basis),
        **score_constants(terms, block, channels, page), num_warps=_warps(channels, block, TOKENS), num_stages=1,
    )  # fmt: skip
    return bias


def _pieces(grid: tuple[int, int, int], terms: PageTerms, channels: int, tokens: int) -> Tensor | None:
    """Scratch memory for each program's matrix of the outliers of a tile of `tokens` tokens."""
    if terms.delta is None:
        return None
    return terms.delta.new_empty(grid[0] * grid[1] * grid[2] * tokens * _padded(channels))


def _mixture_tile(channels: int, turn: int) -> int:
    """Tokens of a tile of mixtures."""
    return min(MIXED_TOKENS * 128 // max(128, _padded(channels)), turn)


def mixture_constants(
    terms: PageTerms, ranked: int, block: int, channels: int, page: int, turn: int, columns: int
) -> dict[str, object]:
    """Constants of `mixture_terms`; a part consists of whole turns of `turn` tokens."""
    wide = 1 if terms.delta is None else terms.delta.shape[-1]
    tokens = _mixture_tile(channels, turn)
    lanes = 64 * _warps(channels, block, tokens)
    sizes = {"D": channels, "DP": _padded(channels), "M": block, "WIDE": wide, "LANES": lanes}
    held = {"ACROSS": terms.across, "RANK": terms.rank, "RANKED": ranked, "COLUMNS": columns}
    return held | sizes | {"BN": tokens, "PAGE": page, "PADDED": triton.cdiv(page, turn) * turn}


def add_to_mixtures(
    parts: tuple[Tensor, Tensor],
    scores: Tensor | None,
    terms: PageTerms,
    vectors: Tensor | None,
    table: Tensor,
    used: Tensor,
    page: int,
    run: int,
    turn: int,
    channels: int,
    map_scale: Tensor | None,
) -> None:
    """Adds outliers and low-rank terms of values to the mixtures of `parts`, in place.

    Args:
        parts: top `[rows, kv_heads, splits, R]` and mixture `[..., R, channels + r or more]`, each of `run` turns of `turn` tokens.
        scores: `[rows, kv_heads, R, slots]`, from which the weights of `terms` are computed.
        vectors: `[rows or 1, kv_heads, r, channels]`, by which the mixtures of coefficients behind the channels are multiplied.
        turn: a power of two, at least 16.
    """
    if terms.lists is not None:
        assert scores is not None, "weights are made of scores"
        list_triton.add_to_mixtures(parts, scores, terms.lists, vectors, used, page, run, turn, channels, map_scale)
        return
    top, mixed = parts
    rows, heads, splits, asked = top.shape
    block, ranked = _block(asked), 0 if vectors is None else vectors.shape[2]
    grid = (splits, rows * heads, triton.cdiv(asked, block))
    constants, tokens = (
        mixture_constants(terms, ranked, block, channels, page, turn, mixed.shape[-1]),
        _mixture_tile(channels, turn),
    )
    launch(
        mixture_terms, grid,
        scores, map_scale, table, used.contiguous(), terms.delta, terms.index, terms.coefficients, terms.basis, vectors,
        top, _pieces(grid, terms, channels, tokens), mixed,
        heads, asked, table.shape[1] * page, table.stride(0), run * turn,
        *scale_strides(map_scale), *_strides(terms.delta), *_strides(terms.coefficients), *_strides(terms.basis),
        *vector_strides(vectors),
        **constants, num_warps=_warps(channels, block, tokens), num_stages=1,
    )  # fmt: skip


_POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}


def _of_no_data(listed: bool, outliers: int = 0, rank: int = 0, page: int = 64, channels: int = 128) -> PageTerms:
    """Terms on the meta device to compile for: `outliers` per channel of a page if `listed`, else per token."""

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float16, device="meta")

    heads, found = 8, PageTerms(listed=listed, across=not listed)
    if outliers:
        shape = (1, heads, 1, outliers * channels) if listed else (1, 1, page, outliers)
        found = replace(found, delta=half(*shape), index=half(*shape).to(torch.int16))
    if rank:
        found = replace(found, coefficients=half(1, heads, page, rank), basis=half(1, heads, 1, rank * channels))
    return found


# Tokens of a turn of attention's kernel for which mixtures are compiled.
TURN = 64


def _types(kernel: object, terms: PageTerms, constants: dict[str, object], **more: str) -> dict[str, str]:
    names = [name for name in kernel.arg_names if name not in constants]  # type: ignore[attr-defined]
    types = {
        name: "*fp32" if name.isupper() else "i32:16" if name.endswith(("_page", "_head")) else "i32" for name in names
    }
    held = {"DELTA": terms.delta, "INDEX": terms.index, "COEFFICIENTS": terms.coefficients, "BASIS": terms.basis}
    types |= {name: _POINTERS[part.dtype] for name, part in held.items() if part is not None}
    types |= {
        "TABLE": "*i32",
        "USED": "*i32",
        "VECTORS": "*fp16",
        "PLACED": types.get("DELTA", ""),
    } | more
    return {name: kind for name, kind in types.items() if name in names}


def _absent(terms: PageTerms) -> dict[str, object]:
    held = {"DELTA": terms.delta, "INDEX": terms.index, "COEFFICIENTS": terms.coefficients, "BASIS": terms.basis}
    absent = [name for name, part in held.items() if part is None]
    absent += ["PLACED"] if terms.delta is None else []
    return dict.fromkeys((*absent, "SCALE"))


def _scores(terms: PageTerms, most: float, page: int = 64) -> Specialisation:
    """Specialisation of `score_terms` with at most `most` instructions per element (token x channel)."""
    block, channels = ROWS[0], 128
    constants = score_constants(terms, block, channels, page) | _absent(terms)
    constants |= {} if terms.listed else {"PLACED": None}
    types = _types(score_terms, terms, constants, QUERY="*bf16", query_scale="fp32")
    warps, codes = _warps(channels, block, TOKENS), TOKENS * channels
    return Specialisation(score_terms, types, constants, warps, 1, codes, most, matrix=inf)


def _mixtures(
    terms: PageTerms,
    ranked: int,
    most: float,
    channels: int = 128,
    page: int = 64,
    block: int = ROWS[0],
    spilled: int = 0,
) -> Specialisation:
    constants = mixture_constants(terms, ranked, block, channels, page, TURN, channels + ranked) | _absent(terms)
    constants |= {} if ranked else {"VECTORS": None}
    constants |= {} if terms.delta is not None or terms.rank else {"SCORES": None}
    tokens = _mixture_tile(channels, TURN)
    types, warps, codes = _types(mixture_terms, terms, constants), _warps(channels, block, tokens), tokens * channels
    return Specialisation(mixture_terms, types, constants, warps, 1, codes, most, matrix=inf, spilled=spilled)


SPECIALISATIONS = {
    "scores, lists of pages, rank 2": _scores(_of_no_data(True, 2, 2, page=20), 9.0, page=20),
    "scores, outliers of tokens": _scores(_of_no_data(False, 20), 4.2),
    "mixtures, of all heads, rank 4": _mixtures(_of_no_data(False, 20), 4, 15),
    "mixtures, of all heads, 16 rows": _mixtures(_of_no_data(False, 20), 4, 16.5, block=ROWS[1], spilled=16),
    "mixtures, 256 channels": _mixtures(_of_no_data(False, 40, channels=256), 4, 14.6, 256, spilled=16),
    "mixtures, rank 2 of pages": _mixtures(_of_no_data(False, 20, 2, page=20), 0, 17.7, page=20, spilled=16),
    "mixtures, rank 4 alone": _mixtures(_of_no_data(False), 4, 1),
    **list_triton.SPECIALISATIONS,
}
