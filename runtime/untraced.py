"""What `torch.compile` leaves as it is: a store's work depends on lengths and positions that differ from step to step."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

REASON = "attention over a compressed cache is not traced; compile with fullgraph=False"


def untraced(function: Function) -> Function:
    """The function, at which a graph of `torch.compile` ends; with `fullgraph=True` torch gives the reason in its error."""
    found: Function = torch.compiler.disable(function, reason=REASON)
    return found
