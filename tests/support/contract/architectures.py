"""The table of architectures: random models from transformers' configuration classes, each with another head geometry.

Norm weights and biases are random too: with transformers' initial ones and zeros, omitting them would not change the output. So is
the embedding of the padding token: it is initialised to zero, and the output of a query of zeros is the plain mean of all values,
in which nearly everything cancels, so that rounding is ten times larger than elsewhere.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from toy_models import COMMON
from transformers import PreTrainedModel

# Sliding window of a model whose layers all slide: wider than a method's exact window, narrower than the prompts, so that pages are
# freed.
SLIDING_ALL = 450
# Sliding window beside full layers: short, because sliding layers are not compressed there and would hide the compression of the
# others.
SLIDING_MIXED = 64
MIXED = {"sliding_window": SLIDING_MIXED, "layer_types": ["full_attention", "sliding_attention"]}


@dataclass(frozen=True)
class Architecture:
    """A model family of transformers and a geometry: `heads` are (query heads, KV heads, head_dim).

    If `named`, head_dim is an entry of the configuration; else the hidden size is query heads x head_dim.
    """

    name: str
    family: str
    heads: tuple[int, int, int]
    named: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A random model in eval mode, the same at every call."""
        query, kv, head_dim = self.heads
        shape: dict[str, Any] = {"num_attention_heads": query, "num_key_value_heads": kv}
        if self.named:
            shape["head_dim"] = head_dim
        else:
            shape["hidden_size"] = query * head_dim
        settings = {**COMMON, **shape, **self.options}
        # A gain of 1.2 for each matrix: attention is peaked and logits lie far apart, so a wrong key changes a token.
        settings["initializer_range"] = 1.2 * settings["hidden_size"] ** -0.5
        # Gemma 3 has a configuration for its text alone.
        config_class = getattr(transformers, f"{self.family}TextConfig", None) or getattr(
            transformers, f"{self.family}Config"
        )
        config = config_class(**settings)
        torch.manual_seed(17)
        model = getattr(transformers, f"{self.family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight += (1.0 if name.endswith("k_proj.bias") else 0.3) * torch.randn_like(weight)
            embedding = model.get_input_embeddings().weight
            zero = (embedding == 0).all(1)
            embedding[zero] = settings["initializer_range"] * torch.randn_like(embedding[zero])
        return model.to(dtype)


def perturbed(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A draft model: a copy with random offsets of `noise` x the deviation of each weight, so that some drafts are rejected."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            offset = torch.randn(weight.shape, generator=generator) * weight.float().std(correction=0)
            weight += (noise * offset).to(weight.dtype)
    # A fixed number of drafts, whatever the draft model's confidence.
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


ARCHITECTURES = [
    Architecture("llama", "Llama", (6, 2, 64), options={"hidden_size": 96}),
    Architecture("mistral", "Mistral", (3, 1, 128), options={"sliding_window": None}),
    Architecture("mistral-sliding", "Mistral", (4, 2, 64), options={"sliding_window": SLIDING_ALL}),
    Architecture("qwen2", "Qwen2", (7, 7, 32)),
    Architecture("qwen3", "Qwen3", (5, 1, 96)),
    Architecture(
        "gemma2",
        "Gemma2",
        (2, 1, 256),
        options={
            **MIXED,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": False,
            "attn_implementation": "eager",  # sdpa has no soft cap
        },
    ),
    Architecture(
        "gemma3", "Gemma3", (4, 2, 64), options={**MIXED, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}
    ),
    Architecture("phi", "Phi", (2, 1, 64), named=False),
    Architecture("phi3", "Phi3", (3, 3, 32), named=False, options={"sliding_window": None}),
    Architecture("olmo2", "Olmo2", (4, 2, 32), named=False),
    Architecture("gpt-neox", "GPTNeoX", (2, 2, 64), named=False),
    Architecture("stablelm", "StableLm", (4, 4, 32), named=False),
]

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
