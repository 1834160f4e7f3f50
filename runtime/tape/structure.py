"""Compares plans without the contents of their tensors: layers with equal structures launch the same kernels."""

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def structure(part: Any) -> Hashable:
    """A key of a stage or plan: its types and values, but of tensors only shape, strides, dtype and device. Values that cannot
    be hashed get a key that equals no other."""
    if isinstance(part, Tensor):
        return part.shape, part.stride(), part.dtype, part.device
    if isinstance(part, tuple | list):
        return type(part), tuple(map(structure, part))
    if isinstance(part, dict):
        return dict, tuple((name, structure(value)) for name, value in part.items())
    if is_dataclass(part):
        return type(part), tuple((field.name, structure(getattr(part, field.name))) for field in fields(part))
    return part if isinstance(part, Hashable) else object()
