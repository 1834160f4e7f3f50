"""Which plans are equal but for the contents of their tensors: layers that have them do the same."""

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def structure(part: Any) -> Hashable:
    """All that a stage or a plan is, but of a tensor only shape, strides, type and device. What cannot be compared is like no
    other."""
    if isinstance(part, Tensor):
        return part.shape, part.stride(), part.dtype, part.device
    if isinstance(part, tuple | list):
        return type(part), tuple(map(structure, part))
    if isinstance(part, dict):
        return dict, tuple((name, structure(value)) for name, value in part.items())
    if is_dataclass(part):
        return type(part), tuple((field.name, structure(getattr(part, field.name))) for field in fields(part))
    return part if isinstance(part, Hashable) else object()
