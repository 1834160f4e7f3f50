"""No speed without a right answer: results are compared before anything is timed, and a difference ends the measurement."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.gpu.bench import NotMeasured

# Relative distance of two outputs in 16 bits: each is rounded (2^-9), and probabilities are rounded to float16 inside.
# Twice what both bring; a term that is left out of a row's bias is 1e-2.
OUTPUT = 5e-3


class Disagrees(NotMeasured):
    """The result differs from the reference's."""


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """`reference` or `triton` for the operations called inside; see `kernels/dispatch.py`."""
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
    """|found - expected| / |expected| in float64; NaN where anything is."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(torch.finfo().tiny))


def agree(what: str, found: Tensor, expected: Tensor, limit: float) -> float:
    """The distance of a result from the reference's; raises Disagrees above `limit`."""
    apart = distance(found, expected)
    if not apart <= limit:  # NaN is not
        raise Disagrees(f"{what} is {apart:.2g} away from the reference (at most {limit:.2g}): no speed is given")
    return apart


def equal(what: str, found: Tensor, expected: Tensor) -> None:
    """Raises Disagrees where stored bits differ."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise Disagrees(
            f"{what}: {found.dtype} {tuple(found.shape)}, the reference {expected.dtype} {tuple(expected.shape)}"
        )
    odd = int((found != expected).sum())
    if odd:
        raise Disagrees(f"{what}: {odd} of {expected.numel()} numbers differ from the reference's: no speed is given")
