"""The operations as callers get them: `operation.py`, or plain torch where an operation has none yet."""

from importlib import import_module
from typing import Any


def operation(folder: str, name: str) -> Any:
    """The function `name` of `kernels/FOLDER`."""
    try:
        return getattr(import_module(f"calib.kernels.{folder}.operation"), name)
    except ModuleNotFoundError:
        return getattr(import_module(f"calib.kernels.{folder}.reference"), name)


attention_mass = operation("probe_saliency", "attention_mass")
matching_pursuit = operation("matching_pursuit", "matching_pursuit")
