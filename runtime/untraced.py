"""Keeps functions out of `torch.compile`: a store's work depends on lengths and positions that differ from step to step."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

REASON = "attention over a compressed cache is not traced; compile with fullgraph=False"


def untraced(function: Function) -> Function:
    """Returns `function` such that `torch.compile` does not trace it (a graph break); with `fullgraph=True` torch's error has
    REASON."""
    found: Function = torch.compiler.disable(function, reason=REASON)
    return found
