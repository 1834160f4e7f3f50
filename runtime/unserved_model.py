"""Finds models whose cache cannot be compressed, from their configuration and modules, before anything runs."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

# Entries of a configuration by which a decoder also attends to another sequence.
CROSS_ATTENTION = ("add_cross_attention", "cross_attention_layers")

# What all layers must share, since a cache has one shape of attention; a configuration that varies one of them raises when it
# is read.
SHARED = ("num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank")


def why_unserved(model: PreTrainedModel) -> str | None:
    """Returns in one line why the model's cache cannot be compressed, and what to do instead; None if it can be."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    named = any(getattr(config, key, None) for key in CROSS_ATTENTION)
    if model.config.is_encoder_decoder or named or _has(model.get_decoder().named_modules(), "encoder_attn"):
        return (
            f"{name} attends to another sequence (an encoder, cross-attention); only the cache of a decoder "
            "that attends to itself alone can be compressed"
        )
    if varied := sorted({*SHARED} & {*(getattr(config, "per_layer_attributes", None) or ())}):
        return (
            f"{name} has layers with different attention shapes ({', '.join(varied)}), and a compressed cache supports only one; "
            "run this model with the cache of transformers"
        )
    if not hasattr(config, "num_attention_heads"):
        return (
            f"{name} names no attention heads in its configuration (num_attention_heads): "
            "it has no plain key-value cache to compress"
        )
    if getattr(config, "kv_lora_rank", None):
        return (
            f"{name} has latent attention (kv_lora_rank={config.kv_lora_rank}): it rebuilds keys and values "
            "itself, which a compressed cache does not support; run this model with the cache of transformers"
        )
    if shared := getattr(config, "num_kv_shared_layers", None):
        return (
            f"{name} has layers without keys and values of their own (num_kv_shared_layers={shared}), which a "
            "compressed cache does not support; run this model with the cache of transformers"
        )
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return (
            f"{name} attends in chunks (attention_chunk_size={getattr(config, 'attention_chunk_size', None)}), and a "
            "compressed cache supports only causal attention and sliding windows; run this model with the cache of transformers"
        )
    if _has(model.get_decoder().named_parameters(), "sinks"):
        return (
            f"{name} has attention sinks as parameters, which a compressed cache does not support; "
            "run this model with the cache of transformers"
        )
    return None


def _has(parts: Iterable[tuple[str, Any]], name: str) -> bool:
    """Whether one of these modules or parameters has this name, which is the same in all models of transformers."""
    return any(part.rpartition(".")[2] == name for part, _ in parts)
