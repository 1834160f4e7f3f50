"""Calls `search.c`: the words of the best paths, on a CPU. Every token is coded by itself, whatever the number of threads."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from calib.kernels.compiled import library
from calib.kernels.dispatch import prefers_compiled
from calib.kernels.pack.heads import first_words
from calib.kernels.pack.reference import Widths

MOST_COMPONENTS = 1024  # of a head, as in search.c
SOURCE = Path(__file__).with_name("search.c")
ROUNDED = ("-ffp-contract=off",)  # products, before they are added: as plain torch has them


class _Search(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "weights", "widths", "begins")),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "tokens", "fields", "wide")),
        ("words", ctypes.c_void_p),
    )


def serves(y: Tensor, weights: Tensor) -> bool:
    """Whether these are coded here."""
    return (
        y.ndim == 4
        and y.dtype == weights.dtype == torch.float32
        and y.shape[-1] <= MOST_COMPONENTS
        and prefers_compiled(y.device)
        and type(y) is Tensor
        and library(SOURCE, ROUNDED) is not None
    )


def trellis_words(y: Tensor, widths: Widths, counts: tuple[int, ...], weights: Tensor) -> Tensor:
    """As `operation.trellis_words` says."""
    batch, heads, tokens, _ = y.shape
    y, weights, begins = y.contiguous(), weights.contiguous(), first_words(counts, y.device)
    words = torch.empty(batch, 1, tokens, sum(counts), dtype=torch.int16)
    sizes = (batch, heads, tokens, len(widths), max(counts))
    at = (y.data_ptr(), weights.data_ptr(), ctypes.addressof(_fields(widths)), begins.data_ptr())
    found = library(SOURCE, ROUNDED)
    assert found is not None
    found.trellis_words(ctypes.byref(_Search(*at, *sizes, words.data_ptr())), ctypes.c_int(torch.get_num_threads()))
    return words


@cache
def _fields(widths: Widths) -> "ctypes.Array[ctypes.c_int32]":
    return (ctypes.c_int32 * len(widths))(*widths)
