"""Stages hold options, tensors and other stages; moving one moves its tensors."""

from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from calib.runtime.stages.shared_table import SharedTable

Stage = TypeVar("Stage")


def tensors_of(stage: Any) -> list[Tensor]:
    """The tensors among a stage's fields and its stages' fields."""
    found: list[Tensor] = []
    for value in vars(stage).values():
        found += [value] if isinstance(value, Tensor) else tensors_of(value) if is_dataclass(value) else []
    return found


def to_device(stage: Stage, device: torch.device) -> Stage:
    """The same stage with copies of its tensors on `device`; a `SharedTable` stays shared between layers."""
    own: dict[str, Any] = {}
    for name, value in vars(stage).items():
        if isinstance(value, Tensor):
            own[name] = value.to(device, copy=True)
        elif isinstance(value, SharedTable):
            own[name] = value.on(device)
        elif is_dataclass(value):
            own[name] = to_device(value, device)
    return replace(stage, **own)  # type: ignore[type-var]
