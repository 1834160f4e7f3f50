"""The attention function that lets a capture see queries, keys and values after RoPE.

transformers calls a registered function with what it would hand to SDPA. Ours passes it on to whoever captures, then
computes the same attention. A mask function of the same name is registered with it: without one transformers would
silently drop the padding mask.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from calib.errors import RunError
from calib.runtime.attention import exact_attention
from calib.runtime.logits import Logits

NAME = "calib_capture"  # transformers treats names with "flash", "sdpa" or "/" in them specially


def capturing_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function: hands (module, q, k, v) to the capture in progress and computes the attention.

    Raises RunError for what it cannot compute exactly (attention sinks, several forwards into one cache).
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise RunError("this model's attention has learned sinks or a position bias, which capture does not measure")
    if query.shape[2] != key.shape[2]:
        raise RunError("capture reads whole sequences; a cache from an earlier forward cannot take part")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    receive = getattr(module, "_calib_receive", None)
    if receive is None:
        raise RunError(
            f"attention '{NAME}' works only while a capture runs; load the model with attn_implementation='sdpa'"
        )
    # Qwen2-MoE tells its window by the mask alone.
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    receive(query, key, value, scaling, softcap, window)
    output = exact_attention(query, key, value, attention_mask, Logits(scaling, softcap, window))
    return output.transpose(1, 2).contiguous(), None


def padding_mask(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """The mask function of the same name: the 2-D padding mask alone, since causality and windows are known."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()


AttentionInterface.register(NAME, capturing_attention)
AttentionMaskInterface.register(NAME, padding_mask)
