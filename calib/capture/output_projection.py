"""The Gram matrix of each KV head's slice of the output projection: how an error of a value changes the layer's output."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.capture.capture import attention_modules
from calib.capture.shape import Shape
from calib.runtime.artifact.fingerprint import offloaded

NAMES = ("o_proj", "out_proj", "dense")


def output_weights(model: PreTrainedModel, shape: Shape) -> tuple[Tensor, list[int]]:
    """Returns G = sum_h Wo_h^T Wo_h over the query heads h of each KV head, float64 `[L, H, D, D]` on the CPU, and unread layers.

    Wo_h `[hidden, D]` is the slice of query head h; L layers, H KV heads, D head_dim. For an error e of a value that has all
    the attention, the squared error of the attention block's output is e^T G e. G is the identity in layers whose projection
    cannot be read (their numbers are the second result), and for a model on the meta device, whose fit is only planned.
    """
    found = torch.eye(shape.head_dim, dtype=torch.float64, device="cpu").repeat(shape.layers, shape.kv_heads, 1, 1)
    unread = []
    for module in attention_modules(model):
        weight = projection(module)
        if weight is None or weight.shape[-1] != shape.heads * shape.head_dim or not weight.is_floating_point():
            unread.append(int(module.layer_idx))
        elif not weight.is_meta:
            slices = weight.detach().T.unflatten(0, (shape.kv_heads, -1, shape.head_dim))  # [H, group, D, hidden]
            for head, part in enumerate(slices):
                rows = part.transpose(0, 1).flatten(1).double()
                found[module.layer_idx, head] = (rows @ rows.mT).cpu()
    return found, unread


def projection(module: nn.Module) -> Tensor | None:
    """Returns the output projection's weight `[hidden, heads * D]`, also of an offloaded layer; None if it has none."""
    found = next((part for name, part in module.named_children() if name in NAMES), None)
    weight = getattr(found, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    kept = offloaded(found) if weight.is_meta and found is not None else None
    return weight if kept is None else kept
