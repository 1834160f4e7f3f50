"""Matrix products of a 16-bit model in float32, rounded once, for CPUs without 16-bit matrix instructions.

On such a processor PyTorch multiplies 16-bit matrices several times as slowly as 32-bit ones.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

PRODUCTS = ("model", "float32")


def multiply_in_float32(model: nn.Module) -> None:
    """Makes the model's linear layers keep a float32 copy of their weights and multiply with it.

    Their inputs and outputs keep the model's dtype, and so do the keys and values that a cache is given.
    """
    for part in model.modules():
        if type(part) is nn.Linear and part.weight.dtype != torch.float32:
            bias = None if part.bias is None else part.bias.detach().float()
            part.forward = partial(_product, part.weight.detach().float(), bias)  # type: ignore[method-assign]


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return functional.linear(x.float(), weight, bias).to(x.dtype)
