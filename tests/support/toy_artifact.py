"""Toy models and a toy artifact with random tensors, small enough that every test can make its own."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.fingerprint import fingerprint

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
CLIP_BITS = (1, 2, 3, 4)
# Figures as a fit records them for the dictionaries in `toy_tensors`.
TOY_FIGURES = [
    {"stream": "keys", "group": 0, "layers": [0], "initial_loss": 0.2, "loss": 0.1, "epochs": 3, "dead": 5},
    {"stream": "keys", "group": 1, "layers": [1], "initial_loss": 0.4, "loss": 0.3, "epochs": 2, "dead": 0},
    {"stream": "values", "group": 0, "layers": [0, 1], "initial_loss": 0.25, "loss": 0.0, "epochs": 3, "dead": 1},
]


def toy_model(family: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    return model(config(**{**SHAPE, **changes})).eval()


def toy_tensors() -> dict[str, torch.Tensor]:
    """Random tensors for `toy_model()`: every kind of registered name, and two names that are not registered."""
    generator = torch.Generator().manual_seed(1)
    per_channel = (2, 2, 8)
    tensors = {
        f"{stream}.{side}": sign * torch.rand(per_channel, generator=generator)
        for stream in ("keys", "values")
        for side, sign in (("low", -1), ("high", 1))
    }
    for name in ("values.scale", "keys.balancer", "queries.mean_square"):
        tensors[name] = 0.5 + torch.rand(per_channel, generator=generator)
    for name in ("keys.clip.32x1", "keys.clip.fixed", "values.clip.1x32", "values.clip.scaled.1x32"):
        tensors[name] = 0.5 + 0.5 * torch.rand(2, 2, len(CLIP_BITS), generator=generator)
    tensors |= toy_thresholds(per_channel, (0.02, 0.1), generator)
    for name in ("keys.residual.*x1.2", "keys.residual.*x1.4", "values.residual.1x*.2", "values.residual.1x4.8"):
        tensors[name] = toy_basis(per_channel, 3, generator)
    tensors |= toy_dictionaries(per_channel, 16, generator)
    tensors |= toy_components(per_channel, generator)
    tensors |= toy_rotations(per_channel, generator)
    tensors["later.dictionary"] = torch.randn(3, 5, generator=generator).to(torch.bfloat16)
    tensors["later.indices"] = torch.arange(7, dtype=torch.int16)
    tensors |= toy_levels(per_channel, (0.0, 0.01), generator)
    tensors |= toy_predictions(tensors, generator)
    tensors |= toy_storage(per_channel, generator)
    return tensors


# Of Max's uniform quantisers of a unit Gaussian (1960): steps at 1 ... 8 bits, mean squared errors at 0 ... 8 bits.
STEPS = (1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000876)


def toy_components(shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors that `klt` reads, for channels of about unit variance; `shape` is (layers, kv_heads, head_dim).

    Bases are rotated, and their weights differ between heads and layers. The loss curves are `klt.loss` and `klt.before.loss`.
    """
    layers, heads, channels = shape
    before = torch.tensor([[0.001, 0.0005], [0.01, 0.004], [0.5, 0.3]])
    tensors = {"klt.before.loss": before, "klt.loss": before * torch.tensor([1.0, 3.0])}
    for stem in ("keys.klt", "keys.klt.before", "values.klt"):
        axes = torch.linalg.qr(torch.randn(layers, heads, channels, channels, generator=generator)).Q
        worth = torch.exp(-torch.linspace(0, 3, channels) + torch.randn(layers, heads, 1, generator=generator))
        tensors[f"{stem}.mean"] = 0.3 * torch.randn(shape, generator=generator)
        tensors[f"{stem}.basis"] = worth[..., None] * axes
        tensors[f"{stem}.steps"] = worth[..., None] * torch.tensor(STEPS)
        tensors[f"{stem}.errors"] = worth[..., None].square() * torch.tensor(ERRORS)
    return tensors


def toy_predictions(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors that `klt` reads in addition with `size` and `predict`; `tensors` are those of `toy_components`.

    Steps are somewhat narrower than without sizes, and the basis of the values' prediction residual is rotated.
    """
    found = {}
    for name, plain in (("keys.klt.sized", "keys.klt.before"), ("values.klt.sized", "values.klt")):
        found |= {
            f"{name}.steps": 0.9 * tensors[f"{plain}.steps"],
            f"{name}.errors": tensors[f"{plain}.errors"].clone(),
        }
    values = tensors["values.klt.basis"]
    turned = torch.linalg.qr(torch.randn(values.shape, generator=generator)).Q
    found["values.klt.predicted.basis"] = values @ turned
    found["values.klt.predicted.matrix"] = 0.2 * torch.randn(values.shape, generator=generator)
    for kind in ("steps", "errors"):
        found[f"values.klt.predicted.{kind}"] = 0.8 * tensors[f"values.klt.{kind}"]
    return found


def toy_storage(shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors that stored chunks read, for channels of about unit variance; `shape` is (layers, kv_heads, head_dim).

    A basis has the channels of all heads, and the random predictions explain little.
    """
    layers, width, found = shape[0], shape[1] * shape[2], {}
    for role, known in (("keys", 2), ("values", 3)):
        axes = torch.linalg.qr(torch.randn(layers, 1, width, width, generator=generator)).Q
        worth = torch.exp(-torch.linspace(0, 3, width) + torch.randn(layers, 1, 1, generator=generator))
        matrix = 0.3 * torch.randn(layers, known * width, width, generator=generator) / width**0.5
        matrix[0, : 2 * width] = 0
        found |= {
            f"{role}.storage.mean": 0.3 * torch.randn(layers, 1, width, generator=generator),
            f"{role}.storage.basis": worth[..., None] * axes,
            f"{role}.storage.steps": 0.9 * worth[..., None] * torch.tensor(STEPS),
            f"{role}.storage.errors": worth[..., None].square() * torch.tensor(ERRORS),
            f"{role}.storage.matrix": matrix,
        }
    return found


def toy_thresholds(
    shape: tuple[int, int, int], shares: tuple[float, ...], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Outlier shares, and thresholds of both streams for each share, narrower for larger shares.

    `shape` is (layers, kv_heads, head_dim).
    """
    tensors = {"outliers.shares": torch.tensor(shares)}
    for stream in ("keys", "values"):
        for part, axes in (("channel", shape), ("head", shape[:2]), ("layer", shape[:1])):
            for end, sign in (("low", -1), ("high", 1)):
                width = sign * (1 + torch.rand(*axes, 1, generator=generator))
                tensors[f"{stream}.outliers.{part}.{end}"] = width * (1.5 - torch.tensor(shares))
    return tensors


def toy_levels(
    shape: tuple[int, int, int], shares: tuple[float, ...], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The tensors that `kvquant` reads: ranges of keys before RoPE, narrower for larger shares, and levels of both streams."""
    width = (1 + torch.rand(*shape, 1, generator=generator)) * (1.2 - 20 * torch.tensor(shares))
    centre = 0.3 * torch.randn(*shape, 1, generator=generator)
    tensors = {"nuq.shares": torch.tensor(shares), "keys.nuq.low": centre - width, "keys.nuq.high": centre + width}
    for stream in ("keys", "values"):
        for bits in (2, 3, 4):
            drawn = 2 * torch.rand(shape[0], len(shares), 2**bits, generator=generator) - 1
            tensors[f"{stream}.nuq.levels.{bits}"] = drawn.sort(-1).values
    return tensors


def toy_basis(shape: tuple[int, int, int], rank: int, generator: torch.Generator) -> torch.Tensor:
    """A random residual basis `[layers, kv_heads, rank, head_dim]`, rows orthonormal."""
    return torch.linalg.qr(torch.randn(*shape, rank, generator=generator)).Q.mT.contiguous()


def toy_rotations(shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random rotations of both streams, `shape` being (layers, kv_heads, head_dim)."""
    return {f"{stream}.rotation": toy_basis(shape, shape[2], generator) for stream in ("keys", "values")}


def toy_dictionaries(shape: tuple[int, int, int], atoms: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Layer groups, divergences and random dictionaries: for keys one group a layer, for values one of all layers, whose atoms have
    head_dim / 2 channels."""
    layers, _, head_dim = shape
    tensors = {}
    for stream, groups, width in (("keys", layers, head_dim), ("values", 1, head_dim // 2)):
        tensors[f"{stream}.layer_groups"] = torch.arange(layers).clamp(max=groups - 1)
        half = torch.rand(layers, layers, generator=generator).triu(1) / 2
        tensors[f"{stream}.divergence"] = half + half.T
        dictionary = torch.randn(groups, atoms, width, generator=generator)
        tensors[f"{stream}.dictionary"] = torch.nn.functional.normalize(dictionary, dim=-1).half()
    return tensors


def toy_artifact(model: PreTrainedModel | None = None, **changes: object) -> Artifact:
    fields = {
        "tensors": toy_tensors(),
        "fingerprint": fingerprint(model or toy_model()),
        "provenance": {
            "data": {"dataset": "generated", "split": "train", "sha256": "0" * 64, "tokens": 4096},
            "seed": 7,
            "versions": {"torch": "2.13.0", "calib": "0.1.0"},
            "metrics": {
                "heldout_error": 0.25,
                "layers": [
                    {"layer": layer, "key range": 3.5 + layer, "error at 2 bit": 0.123456} for layer in range(2)
                ],
            },
            "config": {"model": {"bits": [2, 4]}},
        },
        "clip_bits": CLIP_BITS,
    }
    return Artifact(**{**fields, **changes})
