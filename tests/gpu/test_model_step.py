"""Two decode steps of a bfloat16 model with grouped queries: kernels against plain torch, from copies of one cache."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calib.runtime import compress

METHODS = [
    ("kivi", {"bits": 4}),
    ("kivi", {"bits": 2, "group": 64}),
    ("rtn", {"bits": 4}),
    ("zipcache", {}),
    ("mikv", {}),
    ("gear", {}),
    ("full", {}),
]

# Tolerance relative to the largest logit: in both layers each result is rounded to 8 bits.
LOGITS = 2**-4


@pytest.mark.parametrize(("method", "options"), METHODS, ids=str)
def test_a_step(device, times, method, options, monkeypatch):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 101}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.15)).to(device, torch.bfloat16).eval()
    ids = torch.randint(3, 101, (2, 130 * times), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad(), compress(model, method, **options) as cache:
        monkeypatch.setenv("CALIB_KERNELS", "reference")
        model(ids[:, :-3], past_key_values=cache)
        other = copy.deepcopy(cache)
        with other:
            expected = [model(ids[:, at : at + 1], past_key_values=other).logits for at in range(-3, -1)]
        monkeypatch.setenv("CALIB_KERNELS", "triton")
        found = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(-3, -1)]
    for mine, plain in zip(found, expected, strict=True):
        assert float((mine - plain).abs().max()) <= LOGITS * float(plain.abs().max())
