"""Calls `trellis.c`: encodes components as trellis-coded words, and decodes words to levels, on a CPU.

The result of a token depends on neither other tokens nor the number of threads."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from calib.kernels.compiled import library
from calib.kernels.dispatch import prefers_compiled
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import Widths

MOST_COMPONENTS = 1024  # most components of a head, as in trellis.c
SOURCE = Path(__file__).with_name("trellis.c")
ROUNDED = ("-ffp-contract=off",)  # products are rounded before they are added, as in plain torch


class _Tile(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "widths", "begins")),
        *((name, ctypes.c_int64) for name in ("row_stride", "word_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "tokens", "fields", "wide")),
        ("levels", ctypes.c_void_p),
    )


class _Search(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "weights", "widths", "begins")),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "tokens", "fields", "wide")),
        ("words", ctypes.c_void_p),
    )


def serves(y: Tensor, weights: Tensor) -> bool:
    """Whether `trellis_words` supports these."""
    return y.ndim == 4 and y.dtype == weights.dtype == torch.float32 and y.shape[-1] <= MOST_COMPONENTS and _serves(y)


def reads(words: Tensor) -> bool:
    """Whether `trellis_levels` supports a tile's `words [batch, 1, W, T]`."""
    return words.ndim == 4 and words.dtype == torch.int16 and words.stride(3) == 1 and _serves(words)


def _serves(part: Tensor) -> bool:
    """Whether `part` is an ordinary CPU tensor, not a tracer's, and the C library is available."""
    return prefers_compiled(part.device) and type(part) is Tensor and library(SOURCE, ROUNDED) is not None


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """As `operation.trellis_words`."""
    batch, heads, tokens, _ = y.shape
    y, weights, begins = y.contiguous(), weights.contiguous(), first_words(counts, y.device)
    words = torch.empty(batch, 1, tokens, sum(counts), dtype=torch.int16)
    sizes = (batch, heads, tokens, len(widths), max(counts))
    at = (y.data_ptr(), weights.data_ptr(), ctypes.addressof(_fields(widths)), begins.data_ptr())
    _run("trellis_words", _Search(*at, *sizes, words.data_ptr()))
    return words


def trellis_levels(words: Tensor, widths: Widths, counts: tuple[int, ...]) -> Tensor:
    """As `operation.trellis_levels`; 0 for components beyond a head's own words."""
    batch, _, _, tokens = words.shape
    sizes = (batch, len(counts), tokens, len(widths), max(counts))
    levels = torch.empty(batch, len(counts), len(widths) * max(counts), tokens, dtype=torch.int16)
    at = (words.data_ptr(), ctypes.addressof(_fields(widths)), first_words(counts, words.device).data_ptr())
    _run("trellis_levels", _Tile(*at, words.stride(0), words.stride(2), *sizes, levels.data_ptr()))
    return levels


def _run(name: str, given: ctypes.Structure) -> None:
    found = library(SOURCE, ROUNDED)
    assert found is not None
    getattr(found, name)(ctypes.byref(given), ctypes.c_int(torch.get_num_threads()))


@cache
def _fields(widths: Widths) -> "ctypes.Array[ctypes.c_int32]":
    return (ctypes.c_int32 * len(widths))(*widths)
