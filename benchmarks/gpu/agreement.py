"""Checks that results agree with a reference before anything is timed; a difference ends the measurement without a figure."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.gpu.bench import NotMeasured

# Largest relative distance of two outputs in 16 bits: each is rounded (2^-9), and probabilities are rounded to float16 in the
# kernel. The limit is twice both effects; a missing term of a row's bias would give 1e-2.
OUTPUT = 5e-3


class Disagrees(NotMeasured):
    """A result differs from the reference's."""


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """Context in which operations use their `reference` or `triton` implementation (`kernels/dispatch.py`)."""
    before = os.environ.get("CALIB_KERNELS")
    os.environ["CALIB_KERNELS"] = which
    try:
        yield
    finally:
        if before is None:
            del os.environ["CALIB_KERNELS"]
        else:
            os.environ["CALIB_KERNELS"] = before


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns |found - expected| / |expected| in float64; NaN if any entry is NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(torch.finfo().tiny))


def agree(what: str, found: Tensor, expected: Tensor, limit: float) -> float:
    """Returns the relative distance of a result from the reference's; raises Disagrees if it is above `limit` or NaN."""
    apart = distance(found, expected)
    if not apart <= limit:  # NaN is not
        raise Disagrees(f"{what} is {apart:.2g} away from the reference (at most {limit:.2g}): no speed is given")
    return apart


def equal(what: str, found: Tensor, expected: Tensor) -> None:
    """Raises Disagrees unless dtype, shape and all numbers are equal."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise Disagrees(
            f"{what}: {found.dtype} {tuple(found.shape)}, the reference {expected.dtype} {tuple(expected.shape)}"
        )
    odd = int((found != expected).sum())
    if odd:
        raise Disagrees(f"{what}: {odd} of {expected.numel()} numbers differ from the reference's: no speed is given")
