"""Toy random language models with a byte tokenizer, and a little text: small inputs for a fit."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=24),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=32),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=24, query_pre_attn_scalar=32),
}


def toy_model(kind: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random model whose keys and values differ from head to head and channel to channel."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                # Some channels far larger than the rest, as trained models have them.
                parameter.data *= 8 * torch.exp(torch.randn(len(parameter), 1))
    return model.requires_grad_(False)


def letters_alone(model: PreTrainedModel) -> PreTrainedModel:
    """Change `model` so that it always generates letters a ... z, and return it: the logits of half of the letters are the others'
    negatives, so that one of them is positive, and all other logits are 0."""
    ids = toy_tokenizer().convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    weights = model.lm_head.weight.data
    half = weights[ids[:13]].clone()
    weights.zero_()
    weights[ids] = torch.cat([half, -half])
    return model


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, after `<pad>`, `<s>` and `</s>`."""
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def save_toy(folder: Path, kind: str = "llama", model: PreTrainedModel | None = None) -> Path:
    """Writes a toy model and its tokenizer into `folder`."""
    (model or toy_model(kind)).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def save_text(path: Path, lines: int = 300) -> Path:
    """Writes seeded lines of words; about 40 bytes a line."""
    words = random.Random(0)
    syllables = ["ka", "lo", "mi", "ne", "ru", "ta", "so", "pe"]
    text = "".join(
        " ".join("".join(words.choices(syllables, k=words.randint(1, 3))) for _ in range(8)) + "\n"
        for _ in range(lines)
    )
    path.write_text(text, encoding="utf-8")
    return path
