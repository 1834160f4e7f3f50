"""Moves arguments to another device, so that a test on a GPU can compare with the reference on the CPU."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def moved(given: Any, device: torch.device | str) -> Any:
    """Return `given` with all tensors, also those in tuples, lists, dicts and dataclasses, on `device`."""
    if isinstance(given, Tensor):
        return given.to(device)
    if isinstance(given, dict):
        return {name: moved(part, device) for name, part in given.items()}
    if isinstance(given, tuple | list):
        return type(given)(moved(part, device) for part in given)
    if is_dataclass(given) and not isinstance(given, type):
        return replace(given, **{field.name: moved(getattr(given, field.name), device) for field in fields(given)})
    return given


def near(found: Tensor, expected: Tensor, limit: float) -> None:
    """Assert equal shapes and |found - expected| <= `limit` |expected| (2-norms, float64 on the CPU); NaN fails."""
    apart = (found.cpu().double() - expected.cpu().double()).norm() / expected.cpu().double().norm()
    assert found.shape == expected.shape
    assert float(apart) <= limit
