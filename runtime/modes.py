"""torch's modes around a cache: stored tensors are ordinary ones without gradients, whatever mode a forward runs in."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

AUTOCAST = ("cuda", "cpu")  # device types for which torch.autocast is switched off

QKV = ParamSpec("QKV")
Result = TypeVar("Result")

INFERENCE = (
    "gradients do not go through a compressed cache: tokens are stored without them; call the model under torch.no_grad(), "
    "or train without this cache"
)


def with_ordinary_tensors(function: Callable[QKV, Result]) -> Callable[QKV, Result]:
    """Decorates `function` to run outside `torch.inference_mode` and `torch.autocast`.

    Tensors made under inference mode can be changed in place only there, but a cache may be filled under it and used outside.
    Autocast would compute products at lower precision, from which codes are made.
    """

    @wraps(function)
    def ordinary(*args: QKV.args, **kwargs: QKV.kwargs) -> Result:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return ordinary(*args, **kwargs)
        for device in AUTOCAST:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return ordinary(*args, **kwargs)
        return function(*args, **kwargs)

    return ordinary


def wants_gradients(*given: Tensor) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(part.requires_grad for part in given)


def without_gradients(output: Tensor, *given: Tensor) -> Tensor:
    """`output`, computed from `given` without a graph, such that a backward pass through it raises ValueError, instead of
    returning partial gradients."""
    found: Tensor = _Refusing.apply(output, *given)  # type: ignore[no-untyped-call]
    return found


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *given: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError(INFERENCE)
