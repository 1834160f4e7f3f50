"""Stages hold options and tensors; moving one moves its tensors."""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Stage = TypeVar("Stage")


def own_tensors(stage: Any) -> list[Tensor]:
    """The tensors among a stage's fields."""
    return [value for value in vars(stage).values() if isinstance(value, Tensor)]


def moved(stage: Stage, device: torch.device) -> Stage:
    """The same stage with its tensors on `device`, in storage of their own."""
    own = {name: value for name, value in vars(stage).items() if isinstance(value, Tensor)}
    return replace(stage, **{name: value.to(device, copy=True) for name, value in own.items()})  # type: ignore[type-var]
