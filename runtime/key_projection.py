"""The bias of a model's key projections (as in Qwen2), where it is part of the keys in the cache."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.kernels.dispatch import prefers_triton
from calib.runtime.stages.codec.unserved import warn_once
from calib.runtime.stages.transform import WithoutBias
from calib.runtime.store import Plan

KEPT = "use key_bias='kept'"


def with_key_biases(plans: dict[int, Plan], model: PreTrainedModel) -> dict[int, Plan]:
    """Returns the plans by layer; those that lack the bias of their layer's keys get the model's. Raises ValueError like
    `key_bias`."""
    if not any(plan.lacks_key_bias for plan in plans.values()):
        return plans
    found = {
        layer: plan.with_key_bias(key_bias(model, layer)) if plan.lacks_key_bias else plan
        for layer, plan in plans.items()
    }
    if prefers_triton(model.device):
        warn_once(
            WithoutBias, "no kernel supports key_bias='folded': attention reads pages tile by tile in plain torch", 5
        )
    return found


def key_bias(model: PreTrainedModel, layer: int) -> Tensor:
    """The bias of the key projection in attention layer `layer`, `[kv_heads, head_dim]` in the model's dtype; it is added
    before RoPE.

    Raises ValueError where the projection has no bias, where keys are normalised after it, and where the layer does not have
    exactly one `k_proj`.
    """
    name = type(model).__name__
    projections = [(part, part.k_proj) for part in model.modules() if _is_of(part, layer)]
    if len(projections) != 1:
        raise ValueError(f"{name} has {len(projections)} key projections k_proj in layer {layer}, expected one; {KEPT}")
    ((attention, projection),) = projections
    bias: Tensor | None = getattr(projection, "bias", None)
    if bias is None:
        raise ValueError(f"{name} has no bias of keys in layer {layer} for key_bias='folded' to subtract; {KEPT}")
    norms = [part for part in ("k_norm", "k_layernorm") if getattr(attention, part, None) is not None]
    if norms:
        raise ValueError(
            f"{name} normalises keys ({norms[0]}) after adding their bias, which is then different in each token; {KEPT}"
        )
    return bias.detach().view(-1, attention.head_dim)


def _is_of(part: nn.Module, layer: int) -> Any:
    """Whether `part` is the attention of this layer, with a key projection of its own."""
    return getattr(part, "layer_idx", None) == layer and isinstance(getattr(part, "k_proj", None), nn.Module)
