"""Toy models of the families that engines serve, artifacts for them, and a cache that rounds to fp8 as an engine does."""

from collections.abc import Mapping
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_language_model import CONFIGS, SIZES
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaAttention

from calib.capture.capture import stream
from calib.capture.shape import Shape
from calib.runtime import Artifact
from calib.runtime.artifact.fingerprint import fingerprint
from calib.statistics.channel_range import ChannelRanges

WITHOUT_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}

FAMILIES = {
    **CONFIGS,  # llama, mistral, qwen3, gemma2, gemma3
    "qwen2": lambda: Qwen2Config(**WITHOUT_HEAD_DIM),
    "phi3": lambda: Phi3Config(**WITHOUT_HEAD_DIM),  # one projection for queries, keys and values
    # Its weights are saved under other names than its modules have, and its vision tower has attention without a KV cache.
    "gemma3-vision": lambda: Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(), vision_config=SiglipVisionConfig(**EYES, patch_size=14).to_dict()
    ),
}


def needs_compressed_tensors() -> None:
    """Skip a test if compressed-tensors is missing, or does not recognise the cache argument of this transformers' attention."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    if "past_key_values" not in signature(LlamaAttention.forward).parameters:
        releases = " and ".join(f"{name} {version(name)}" for name in ("compressed-tensors", "transformers"))
        pytest.skip(
            f"{releases}: the first knows a KV cache by the argument past_key_values, which the second calls cache"
        )


def family_model(family: str) -> PreTrainedModel:
    """A random model, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(FAMILIES[family]()).eval().requires_grad_(False)


def sizes(model: PreTrainedModel) -> Shape:
    found = fingerprint(model)
    return Shape(*(found[name] for name in ("layers", "heads", "kv_heads", "head_dim")))


def random_ranges(model: PreTrainedModel) -> dict[str, Tensor]:
    """Random `keys.low`, ... `values.high`, float32 `[layers, kv_heads, head_dim]`; all entries differ."""
    shape = sizes(model)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(4, shape.layers, shape.kv_heads, shape.head_dim, generator=generator) * 10 + 0.1
    return {"keys.low": -drawn[0], "keys.high": drawn[1], "values.low": -drawn[2], "values.high": drawn[3]}


def measured_ranges(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """The ranges that `calib fit` measures on `tokens [rows, length]`."""
    ranges = ChannelRanges(sizes(model))
    stream(
        model,
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        torch.arange(tokens.numel()).view_as(tokens),
        ranges.observe,
    )
    return ranges.tensors()


def save_artifact(path: Path, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> str:
    """An artifact of `model` with these tensors alone; returns its path."""
    Artifact(tensors, fingerprint(model), {"data": {}, "seed": 0, "versions": {}, "metrics": {}, "config": {}}).save(
        path
    )
    return str(path)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """`x` as an engine reads it back: x / scale, clamped to +-448, rounded to float8 e4m3, times scale; in the dtype of `x`."""
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


class Fp8Layer(DynamicLayer):
    """A layer of a `DynamicCache` that rounds keys and values to fp8 before it stores them."""

    def __init__(self, k_scale: Tensor, v_scale: Tensor) -> None:
        super().__init__()
        self.k_scale, self.v_scale = k_scale, v_scale

    def update(self, keys, values, *rest, **named):
        return super().update(rounded(keys, self.k_scale), rounded(values, self.v_scale), *rest, **named)


def fp8_logits(model: PreTrainedModel, tokens: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The model's logits `[rows, length, vocabulary]` with keys and values in fp8, by the k_scale and v_scale in `tensors`."""
    cache = DynamicCache()
    prefix = "model.layers.{}.self_attn.{}_scale"
    cache.layers = [
        Fp8Layer(tensors[prefix.format(layer, "k")], tensors[prefix.format(layer, "v")])
        for layer in range(model.config.num_hidden_layers)
    ]
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits
