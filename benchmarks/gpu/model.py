"""A model of the 8B shape with random weights, created on the device."""

import gc

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.bench import Bench

SAID = "LlamaConfig of the 8B shape, random weights, 4 of 32 layers and an eighth of the vocabulary"


def model_of(bench: Bench) -> LlamaForCausalLM:
    """Returns the model in eval mode, on the device, in `bench.dtype`."""
    size = bench.sizes
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        vocab_size=size.vocabulary,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2 * size.tokens,
        eos_token_id=None,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with bench.device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def ids_of(bench: Bench, rows: int, count: int) -> Tensor:
    """Returns random token ids `[rows, count]`."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, bench.sizes.vocabulary, (rows, count), generator=draw).to(bench.device)


def tidy(bench: Bench) -> None:
    """Frees unused memory, also that cached by torch's allocator."""
    gc.collect()
    if bench.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
