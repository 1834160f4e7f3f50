"""Random models of several families, small enough for every test, with distinct head geometries.

Weights are larger than a usual initialisation so that attention is peaked and logits are far apart: then a wrong key
changes a token instead of hiding in the noise.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 101
NEW = 24  # tokens that `generate` adds
SLIDING = 48  # tokens; shorter than the prompts of the tests

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HEADS_4_2_32 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
HEADS_3_1_64 = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
HEADS_2_2_64 = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, HEADS_4_2_32),
    "llama-64": (LlamaForCausalLM, LlamaConfig, HEADS_2_2_64),
    "mistral": (MistralForCausalLM, MistralConfig, {**HEADS_3_1_64, "sliding_window": None}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {**HEADS_4_2_32, "sliding_window": SLIDING}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, HEADS_2_2_64),
    # The first layer has full attention and is compressed; the second has a sliding window and is not.
    "qwen3-mixed": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            **HEADS_4_2_32,
            "use_sliding_window": True,
            "sliding_window": SLIDING,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    # A soft cap on the logits, another scale than head_dim^-1/2, and again one layer of each kind.
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            **HEADS_4_2_32,
            "sliding_window": SLIDING,
            "layer_types": ["full_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 20,
            "attn_implementation": "eager",  # sdpa has no soft cap
        },
    ),
}


def random_model(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """A model of `family` in eval mode, the same at every call; `changes` override its configuration."""
    model_class, config_class, shape = FAMILIES[family]
    torch.manual_seed(len(family))
    return model_class(config_class(**{**COMMON, **shape, **changes})).to(dtype).eval()


def biased_model(dtype: torch.dtype = torch.float32, partial: bool = False, **changes: object) -> PreTrainedModel:
    """A random Qwen2 with large key biases, in eval mode; if `partial`, a Phi, whose RoPE rotates half of the channels."""
    torch.manual_seed(11)
    settings = {**COMMON, **HEADS_4_2_32, **changes}
    if partial:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        model: PreTrainedModel = PhiForCausalLM(PhiConfig(**settings, rope_parameters=rope))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj.bias.data = 20 * torch.randn(attention.k_proj.out_features)
    return model.to(dtype).eval()


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, int64 `[rows, longest]`: random tokens, with padding on the left."""
    longest = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    tokens = torch.randint(2, VOCABULARY, mask.shape, generator=generator)
    return {"input_ids": tokens * mask, "attention_mask": mask}


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Cache, **options: Any) -> Any:
    """Run `model.generate` with `cache`: greedy, NEW tokens, logits in the result; `options` override these settings."""
    settings = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **settings)


def draft_of(model, tokens: int):
    """A copy of the model that is often wrong and drafts `tokens` tokens at a time."""
    draft = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * weight.std() * torch.randn_like(weight)) if weight.ndim > 1 else None
    draft.generation_config.num_assistant_tokens = tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft
