"""Stores new tokens into slots of pages and other tensors, by the implementation for the device."""

from collections.abc import Sequence
from functools import cache
from types import ModuleType

from calib.kernels.dispatch import prefers_triton
from calib.kernels.put_tokens import reference
from calib.kernels.put_tokens.reference import Put

__all__ = ["Put", "put_tokens"]


def put_tokens(puts: Sequence[Put]) -> None:
    """Stores the tokens of all `puts`, in any order: no tensor may be both read and written. All are on one device."""
    if puts and prefers_triton(puts[0].into.device):
        puts = _triton().put_tokens(puts)
    reference.put_tokens(puts)


@cache
def _triton() -> ModuleType:
    from calib.kernels.put_tokens import triton

    return triton
