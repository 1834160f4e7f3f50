"""Operations as callers use them: from `operation.py`, or from `reference.py` if an operation has no `operation.py`."""

from importlib import import_module
from typing import Any


def operation(folder: str, name: str) -> Any:
    """Returns the function `name` of `kernels/FOLDER`."""
    try:
        return getattr(import_module(f"calib.kernels.{folder}.operation"), name)
    except ModuleNotFoundError:
        return getattr(import_module(f"calib.kernels.{folder}.reference"), name)


attention_mass = operation("probe_saliency", "attention_mass")
matching_pursuit = operation("matching_pursuit", "matching_pursuit")
