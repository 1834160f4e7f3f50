"""The config.json of the models for which configurations are shipped, and toy models of the same architectures.

A toy keeps the class, RoPE, norms, biases, soft caps, head_dim and the query heads of each KV head. It has 2 KV heads, 2 layers,
small widths and a short sliding window. If full and sliding-window layers alternate in the published model, it has one of each.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from toy_language_model import toy_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

WINDOW = 96  # sliding window of toys, in tokens: more than the window of StreamingLLM's toy, less than the prompts
VOCABULARY = 259

LLAMA2 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "torch_dtype": "float16", "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
LLAMA3 = LLAMA2 | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
QWEN2_5 = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 131072, "max_window_layers": 28, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 2047, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "float32", "vocab_size": 256000,
}  # fmt: skip
GEMMA3_TEXT = {
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256, "vocab_size": 262208,
}  # fmt: skip
BAICHUAN2 = {
    "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096, "model_max_length": 4096,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 125696,
}  # fmt: skip

# By the name of the shipped configuration.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama2": LLAMA2,
    "llama2_chat": LLAMA2,
    "llama2_13b": LLAMA2
    | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
    | {"num_key_value_heads": 40},
    "llama2_70b": LLAMA2
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8},
    "llama3": LLAMA3,
    "llama3_1": LLAMA3
    | {
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "mistral": LLAMA3
    | {"model_type": "mistral", "max_position_embeddings": 32768, "rope_theta": 1000000.0, "vocab_size": 32768}
    | {"sliding_window": None},
    "qwen2_5": QWEN2_5,
    "qwen3": LLAMA3
    | {"model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "max_position_embeddings": 40960}
    | {"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False, "vocab_size": 151936},
    "gemma2": GEMMA2,
    "gemma3": {"model_type": "gemma3", "text_config": GEMMA3_TEXT, "torch_dtype": "bfloat16"},
    "phi3": PHI3,
    "phi3_128k": PHI3
    | {
        "max_position_embeddings": 131072,
        "sliding_window": 262144,
        # 48 numbers each as in the published model, but other ones of that magnitude: rising from 1 to 3 and from 1 to 65.
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1 + 2 * i / 47 for i in range(48)],
            "long_factor": [1 + 64 * i / 47 for i in range(48)],
        },
    },
    "baichuan2": BAICHUAN2,
}


def text_of(published: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    return published.get("text_config", published)


def heads_of(published: dict[str, Any]) -> tuple[int, int, int, int]:
    """Numbers of layers, query heads and KV heads, and head_dim, of the language model."""
    text = text_of(published)
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads", heads)
    return text["num_hidden_layers"], heads, kv_heads, text.get("head_dim") or text["hidden_size"] // heads


def toy_config(name: str) -> PreTrainedConfig:
    """The toy configuration of the model of `name`.yaml, in transformers' class of that model."""
    published = PUBLISHED[name]
    _, heads, kv_heads, head_dim = heads_of(published)
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * heads // kv_heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    text = text_of(published)
    if text["model_type"] == "phi3":  # has no head_dim of its own
        small |= {"hidden_size": 2 * head_dim}
    if (text.get("sliding_window") or 0) < text["max_position_embeddings"] and text.get("sliding_window"):
        small |= {"sliding_window": WINDOW}
    if text["model_type"] == "gemma3_text":
        small |= {"layer_types": ["sliding_attention", "full_attention"]}
    classes = transformers.CONFIG_MAPPING
    if "text_config" not in published:
        return classes[text["model_type"]](**text | small)
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
    }
    return classes[published["model_type"]](text_config=text | small, vision_config=vision, mm_tokens_per_image=4)


def toy_of(name: str) -> PreTrainedModel:
    """A random toy of the model of `name`.yaml in float32, with peaked attention; norms and biases are random, so that omitting one
    changes the output."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(toy_config(name)).float()
        for key, weight in model.named_parameters():
            gain = torch.exp(0.5 * torch.randn(weight.shape[0], *[1] * (weight.dim() - 1)))
            weight.data *= gain * (4 if "_proj" in key and weight.dim() == 2 else 1)
            if weight.dim() == 1:
                weight.data += 0.2 * torch.randn_like(weight)
    return model.eval()


def save_toy_of(name: str, folder: Path) -> None:
    """Write `toy_of(name)`, in the dtype of the published weights, and a tokenizer into `folder`."""
    toy_of(name).to(getattr(torch, PUBLISHED[name]["torch_dtype"])).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
