"""Writes a small random Llama or Qwen2 as a GGUF file in llama.cpp's format."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

HEADS, KV_HEADS, CHANNELS, HIDDEN = 4, 2, 32, 128
SIZES = {
    "vocab_size": 260,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CONFIGS = {"llama": lambda: LlamaConfig(**SIZES, head_dim=CHANNELS), "qwen2": lambda: Qwen2Config(**SIZES)}
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "<|start|>", "<|end|>"]
TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"


def tiny_model(kind: str) -> PreTrainedModel:
    """The random model whose weights are in the file, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval().requires_grad_(False)


def save_gguf(
    path: Path,
    kind: str = "llama",
    quantised: bool = False,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    without: tuple[str, ...] = (),
    ends: bool = True,
) -> PreTrainedModel:
    """Write the file and return its model; `quantised`: matrices in 8 bits (Q8_0), with a scale for 32 weights. `more` writes
    further entries; `without` are weights that are left out; `ends`: whether first, last and padding tokens are named."""
    model = tiny_model(kind)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(CHANNELS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"llama": "default", "qwen2": "qwen2"}[kind])
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(["t h", "th e"])
    if ends:
        writer.add_bos_token_id(TOKENS.index("<|start|>"))
        writer.add_eos_token_id(TOKENS.index("<|end|>"))
        writer.add_pad_token_id(TOKENS.index("<|end|>"))
    writer.add_chat_template(TEMPLATE)
    more(writer)
    for name, tensor in model.state_dict().items():
        if name in without:
            continue
        content = as_stored(name, tensor, kind).numpy()
        if quantised and content.ndim == 2:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(content, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(content))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of transformers' model."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    own, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[own]}.{kind}"


def as_stored(name: str, tensor: Tensor, kind: str) -> Tensor:
    """The tensor in llama.cpp's order: for a Llama, RoPE rotates pairs of neighbouring channels there, and (i, i + D/2) in
    transformers, so the rows of query and key projections are permuted."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2]) if kind == "llama" else None
    if heads is None:
        return tensor
    return tensor.view(heads, 2, CHANNELS // 2, -1).transpose(1, 2).reshape(tensor.shape)
