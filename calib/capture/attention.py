"""The attention function by which a capture receives queries, keys and values after RoPE.

It is registered with transformers' AttentionInterface, which calls it with the arguments of SDPA. It passes them to the
capture in progress and computes the same attention. A mask function is registered under the same name, because without
one transformers would silently drop the padding mask.
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
    """Passes queries, keys and values of layer `module` to the capture in progress and returns the exact attention output.

    The registered function. Shapes: query `[batch, query_heads, tokens, head_dim]`, key and value `[batch, kv_heads,
    tokens, head_dim]`; the output is `[batch, tokens, query_heads, head_dim]`.

    Raises RunError for learned attention sinks, a position bias, a cache with earlier tokens, or if no capture is running.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise RunError("this model's attention has learned sinks or a position bias, which capture does not measure")
    if query.shape[2] != key.shape[2]:
        raise RunError(
            "capture reads whole sequences, but this forward continues a cache; run the model without past_key_values"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    receive = getattr(module, "_calib_receive", None)
    if receive is None:
        raise RunError(
            f"attention '{NAME}' works only while a capture runs; load the model with attn_implementation='sdpa'"
        )
    # Qwen2-MoE does not pass its sliding window to the attention function, only in the mask.
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    receive(query, key, value, scaling, softcap, window)
    output = exact_attention(query, key, value, attention_mask, Logits(scaling, softcap, window))
    return output.transpose(1, 2).contiguous(), None


def padding_mask(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Returns the 2-D padding mask, or None without padding: the mask function of `NAME`.

    Causality and sliding windows are applied by the attention itself.
    """
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()


AttentionInterface.register(NAME, capturing_attention)
AttentionMaskInterface.register(NAME, padding_mask)
