"""Attention layers of a method without a model: they attend and store given queries, keys and values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bases import made_up
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.inputs import queries, tokens
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits
from calib.runtime.memory import measure
from calib.runtime.methods import Geometry, build
from calib.runtime.rotation import Rotation
from calib.runtime.store import LayerContext


@dataclass(frozen=True)
class Heads:
    """Batch rows, query heads, KV heads and channels of a layer."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int


def bare_layers(method: str, heads: Heads, count: int, **options: Any) -> list[CompressedLayer]:
    """Returns `count` empty layers of one cache; those of `klt` have a random artifact, with sizes and predictions for
    `predict`."""
    # The configuration needs a hidden size that the number of heads divides.
    sizes = {"num_hidden_layers": count, "hidden_size": heads.heads, "intermediate_size": 8, "vocab_size": 8}
    shape = {"num_attention_heads": heads.heads, "num_key_value_heads": heads.kv_heads, "head_dim": heads.head_dim}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **shape))
    geometry = Geometry(count, heads.kv_heads, heads.head_dim)
    artifact = made_up(model, sized=bool(options.get("predict"))) if method == "klt" else None
    context = LayerContext(rotation=Rotation.of(model, ""))
    plans = [build(method, options).plan(number, geometry, artifact) for number in range(count)]
    sequences = plans[0].sequences(count, None)
    return [CompressedLayer(plan, sequences, context) for plan in plans]


@torch.no_grad()
def forward(layer: CompressedLayer, query: Tensor, keys: Tensor, values: Tensor, speculative: bool = False) -> Tensor:
    """Updates the layer and returns its attention output, as in a model; with `speculative` the last token is not stored."""
    layer.sequences.speculating = speculative
    layer.update(keys, values)
    return layer.attend(query, None, Logits(query.shape[-1] ** -0.5))


@dataclass(frozen=True)
class Step:
    """The input of a layer in a decode step: `query`, `keys`, `values` of one token, or of two with a speculative one."""

    query: Tensor
    keys: Tensor
    values: Tensor

    @staticmethod
    def drawn(bench: Bench, heads: Heads, keys: Tensor, seed: int, width: int = 1) -> "Step":
        """Returns a random step after a prompt with these `keys`, of `width` tokens."""
        shape = (heads.rows, heads.kv_heads, width, heads.head_dim)
        new = [tokens(*shape, seed=seed + i, device=bench.device, dtype=bench.dtype) for i in (1, 2)]
        return Step(queries(keys, heads.heads, width, seed), *new)


def prompt_of(bench: Bench, heads: Heads, seed: int, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns random keys and values of a prompt of `count` tokens, by default `sizes.tokens`."""
    shape = (heads.rows, heads.kv_heads, count or bench.sizes.tokens, heads.head_dim)
    keys, values = (tokens(*shape, seed=10 * seed + i, device=bench.device, dtype=bench.dtype) for i in (1, 2))
    return keys, values


def filled(layer: CompressedLayer, heads: Heads, keys: Tensor, values: Tensor, seed: int) -> CompressedLayer:
    """Returns the layer after a forward pass over a prompt with these keys and values."""
    forward(layer, queries(keys, heads.heads, keys.shape[2], seed), keys, values)
    return layer


def bits_per_value(layer: CompressedLayer) -> float:
    """Returns the bits per value of all that the layer's store holds on the device, with parameters, window and tables."""
    assert layer.store is not None
    values = layer.store.footprint().values * sum(layer.sequences.lengths)
    return 8 * (measure(layer.store) - measure(layer.store.on_host())) / values
