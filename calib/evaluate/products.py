"""Products of a 16-bit model on a CPU that has no instructions for them: in float32, rounded once, as those would do.

PyTorch multiplies 16-bit matrices on such a processor several times as slowly as 32-bit ones.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

PRODUCTS = ("model", "float32")


def multiply_in_float32(model: nn.Module) -> None:
    """From now on the model's linear layers keep a float32 copy of their weights and multiply with that.

    What comes in and what goes out keeps its dtype, and so does everything that a cache is given.
    """
    for part in model.modules():
        if type(part) is nn.Linear and part.weight.dtype != torch.float32:
            bias = None if part.bias is None else part.bias.detach().float()
            part.forward = partial(_product, part.weight.detach().float(), bias)  # type: ignore[method-assign]


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return functional.linear(x.float(), weight, bias).to(x.dtype)
