"""The table of methods: one row for each method and set of options; every test over all cases runs over its rows.

Add a row for a new method. `marginal_bits` are the bits per value of one more token, with head_dim 64 and 2 KV heads in a 16-bit
model, the mean of keys and values. They are worked out by hand from the method's documentation, so that tests compare with it.
"""

from dataclasses import astuple, dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from toy_artifact import (
    toy_artifact,
    toy_basis,
    toy_components,
    toy_dictionaries,
    toy_levels,
    toy_predictions,
    toy_rotations,
    toy_thresholds,
)
from toy_models import random_model
from transformers import PreTrainedModel

from calib.runtime import Artifact, compress
from calib.runtime.cache import CompressedCache
from calib.runtime.methods import Geometry, build
from calib.runtime.store import Plan
from calib.statistics.residual_basis import residual_forms

CLIP_BITS = (1, 2, 3, 4, 8)
RESIDUAL_BITS = (2, 4)
RESIDUAL_FORMS = {"keys": ("*x1", "1x*", "*x*", "half", "64x1"), "values": ("*x1", "1x*", "*x*", "half")}


@dataclass(frozen=True)
class Case:
    """A method with its options, whether it reads an artifact, and whether it is a column of the contract's matrix."""

    name: str
    method: str
    marginal_bits: float
    options: dict[str, Any] = field(default_factory=dict)
    artifact: bool = False
    contract: bool = False

    def __str__(self) -> str:
        return self.name

    @cached_property
    def plan(self) -> Plan:
        """The method's plan for layer 0 of a small model. The properties below return what this plan says."""
        model = _small_model()
        artifact = calibrated_artifact(model) if self.artifact else None
        return build(self.method, self.options).plan(0, Geometry.of(model.config), artifact)

    @property
    def tiered(self) -> bool:
        """Whether tokens are stored in tiers, in any order; some may be evicted."""
        return not self.plan.in_order

    @property
    def observes(self) -> bool:
        """Whether attention decides what is stored."""
        return self.plan.observes

    @property
    def by_forwards(self) -> bool:
        """Whether the result depends on how tokens are split into forwards: attention decides, or a prompt is one segment."""
        return self.plan.by_forwards

    @property
    def joins_heads(self) -> bool:
        """Whether a token's heads share a range, a ranking or factors (GEAR), a dictionary, or which tokens are kept."""
        return self.plan.joins_heads

    @property
    def relocates(self) -> bool:
        """Whether some tokens are attended at other positions than their own."""
        return self.plan.relocates

    @property
    def speculator(self) -> bool:
        """Whether a decode step also has a speculative token."""
        return self.plan.speculative

    @property
    def on_host(self) -> bool:
        """Whether every token is in host memory."""
        return self.plan.on_host

    def open(self, model: PreTrainedModel, seed: int = 0, graphs: bool = False) -> CompressedCache:
        """Return an empty cache of this case for `model`, with the random artifact of `calibrated_artifact` if it reads one."""
        artifact = calibrated_artifact(model) if self.artifact else None
        return compress(model, method=self.method, artifact=artifact, seed=seed, graphs=graphs, **self.options)


CASES = [
    Case("full", "full", 16.0, contract=True),
    Case("rtn-8", "rtn", 8.5, {"bits": 8}),
    Case("rtn-4", "rtn", 4.5, {"bits": 4}, contract=True),
    Case("rtn-2", "rtn", 2.5, {"bits": 2}),
    Case("kivi-8", "kivi", 9.0, {"bits": 8}),
    Case("kivi-4", "kivi", 5.0, {"bits": 4}),
    Case("kivi-2", "kivi", 3.0, {"bits": 2}),
    # 3 bits are 3.25 at 64 channels: 5 codes a word, 13 words. And 32/32 for a scale and a zero point.
    Case("kivi-3-short", "kivi", 4.25, {"bits": 3, "residual": 32}, contract=True),
    Case("kivi-2-short", "kivi", 3.0, {"bits": 2, "residual": 32}, contract=True),
    Case("kivi-2-fine", "kivi", 4.0, {"bits": 2, "group": 16, "residual": 48}),
    Case("kivi-1-midpoints", "kivi", 2.0, {"bits": 1, "residual": 32, "clip": 0.5}),
    Case("kivi-2-clipped", "kivi", 3.0, {"bits": 2, "residual": 32}, artifact=True, contract=True),
    Case(
        "kivi-2-calibrated",
        "kivi",
        2.5,
        {"bits": 2, "residual": 32, "statistics": "calibrated"},
        artifact=True,
        contract=True,
    ),
    # Keys: 4 + 32/16, values: 2 + 32/32.
    Case(
        "kivi-4-keys-2-values",
        "kivi",
        4.5,
        {
            "bits": {"keys": 4, "values": 2},
            "group": {"keys": 16, "values": 32},
            "residual": {"keys": 32, "values": 48},
        },
    ),
    Case("kivi-4-calibrated", "kivi", 4.5, {"bits": 4, "statistics": "calibrated"}, artifact=True),
    Case("rtn-4-clipped", "rtn", 4.5, {"bits": 4}, artifact=True),
    Case("rtn-4-calibrated", "rtn", 4.0, {"bits": 4, "statistics": "calibrated"}, artifact=True, contract=True),
    Case("rtn-1-calibrated", "rtn", 1.0, {"bits": 1, "statistics": "calibrated"}, artifact=True),
    Case(
        "rtn-8-keys-2-values",
        "rtn",
        5.0,
        {"bits": {"keys": 8, "values": 2}, "clip": {"keys": None, "values": 0.9}, "statistics": "calibrated"},
        artifact=True,
    ),
    # A rotation changes neither the number of codes nor that of parameters.
    Case("rtn-4-hadamard", "rtn", 4.5, {"bits": 4, "basis": "hadamard"}),
    Case("rtn-2-rotated", "rtn", 2.5, {"bits": 2, "basis": "calibrated"}, artifact=True),
    Case("kivi-2-hadamard", "kivi", 3.0, {"bits": 2, "residual": 32, "basis": "hadamard"}),
    # Codes take 3.2. Values have a scale and a zero point a token, 32/64 bits, keys none: .25 in the mean.
    # A block of n tokens has ranges of keys (32 bits a channel) and scales of values (16): 24/n for each tier.
    Case("zipcache-short", "zipcache", 3.45 + 4.8, {"recompress": 10}, contract=True),
    Case("zipcache", "zipcache", 3.45 + 1.2, {"recompress": 40}),
    Case("zipcache-frozen", "zipcache", 3.45, {"recompress": 40, "refresh": False}),
    Case("zipcache-before-rope", "zipcache", 3.45 + 1.2 + 0.25, {"recompress": 40, "rope": "before"}),
    Case(
        "zipcache-before-frozen",
        "zipcache",
        2 + 0.25,  # half of 32/64 for a value's scale and zero point; in a single tier positions are not stored
        {"tiers": [[2, 1.0]], "recompress": 40, "rope": "before", "refresh": False},
    ),
    # One scale and zero point for a token's 2 heads: 3.2 + .125.
    Case("zipcache-layer", "zipcache", 3.325 + 1.2, {"recompress": 40, "salient_set": "layer", "scope": "layer"}),
    # A tenth at 16 bits without parameters: 1.6 + 2 + .8 + .9 * .25.
    Case("zipcache-16-4-2", "zipcache", 4.625 + 1.2, {"tiers": [[16, 0.1], [4, 0.5], [2, 0.4]], "recompress": 40}),
    Case("zipcache-evicting", "zipcache", 2.125 + 0.75, {"tiers": [[4, 0.5], [0, 0.5]], "recompress": 32}),
    # 3.2 + .6 * 3.25 + .25.
    Case(
        "zipcache-accumulated",
        "zipcache",
        5.4 + 1.2,
        {
            "tiers": [[8, 0.4], [3, 0.6]],
            "recompress": 40,
            "saliency": "accumulated",
            "probes": "all",
            "value_scale": "tier",
        },
    ),
    Case(
        "zipcache-calibrated",
        "zipcache",
        3.85,
        {"recompress": 20, "ratio": 0.8, "statistics": "calibrated", "clip": 0.9},
        artifact=True,
    ),
    # In the long run a new token is demoted to the retained bits: 2 + 32/32 (half a head has a scale and a zero point), and its
    # position: 32/(2 * 64).
    Case("mikv-16-2", "mikv", 3.25, {"ratio": 0.08, "important": 16, "retained": 2}, contract=True),
    Case("mikv-8-2", "mikv", 3.25, {"important": 8, "retained": 2, "balancer": False}, contract=True),
    Case(
        "mikv-calibrated",
        "mikv",
        5.5,
        {"ratio": 0.3, "important": 4, "retained": 3, "group": 16, "statistics": "calibrated"},
        artifact=True,
    ),
    # Keys: 4 + 32/32, values: 2 + 32/32, and the position.
    Case(
        "mikv-keys-exact",
        "mikv",
        4.25,
        {"ratio": 0.1, "important": {"keys": 16, "values": 8}, "retained": {"keys": 4, "values": 2}},
    ),
    # A budget that is larger than the shorter prompts.
    Case("mikv-budget", "mikv", 5.25, {"budget": 200, "recent": 30, "retained": 4}),
    # Other policies for important tokens: mean attention of a sample of rows, without recent tokens; the newest; a choice by head.
    Case("mikv-normalised", "mikv", 3.25, {"ratio": 0.1, "important": 4, "policy": "normalised", "recent": 0}),
    # Keys by channel: 2 bits; values: 2 + 32/32; a position: .25.
    Case(
        "mikv-channel",
        "mikv",
        2.75,
        {"important": 4, "policy": "local", "statistics": "calibrated", "keys": "channel"},
        artifact=True,
    ),
    Case(
        "mikv-fastgen",
        "mikv",
        3.25,
        {"ratio": 0.1, "policy": "fastgen", "recovery": 0.5},
    ),
    # A norm of 16 bits a token and head of 64 channels. 3 bits: 13 words of 5 codes.
    Case("turboquant", "turboquant", 4.25, contract=True),
    Case("turboquant-3", "turboquant", 3.5, {"bits": 3, "residual": 40}),
    # A scale and a zero point a token and head of 64 channels, or for 32 of them.
    Case("oscar", "oscar", 2.5, {"sinks": 4, "window": 20}, artifact=True, contract=True),
    Case(
        "oscar-4-groups",
        "oscar",
        5.0,
        {"bits": 4, "group": 32, "sinks": 0, "window": 0, "key_clip": 1.0},
        artifact=True,
    ),
    # Tiles of 128 tokens. Keys: 4 + 32/128 + 16/64; values: 2 + 32/64 + 16/128.
    Case("kvarn", "kvarn", 3.5625),
    # 4 + 32/16 + 16/64 and 2 + 32/64 + 16/16.
    Case("kvarn-short", "kvarn", 4.875, {"tile": 16, "sinks": 4}, contract=True),
    # 2 + 32/24 + 16/64 and 2 + 32/64 + 16/24.
    Case("kvarn-2", "kvarn", 3.375, {"bits": 2, "tile": 24, "sinks": 0}),
    Case("h2o", "h2o", 0.0, {"heavy": 0.05, "recent": 0.05}, contract=True),
    Case("tova", "tova", 0.0, {"budget": 0.1}, contract=True),
    # Tokens after the prompt are kept exactly.
    Case("snapkv", "snapkv", 16.0, {"budget": 0.15, "window": 4}, contract=True),
    # Not in the contract, which compares with attention over the stored tokens: with positions inside the cache, and in `oracle`,
    # attention differs from that. test_importance and test_generation cover both.
    Case("streaming_llm", "streaming_llm", 0.0, {"window": 40}),
    Case("streaming_llm-original", "streaming_llm", 0.0, {"window": 60, "positions": "original"}, contract=True),
    Case("oracle", "oracle", 16.0),
    # Blocks of 20 tokens, 2 KV heads. Keys: 4 + ranges 32/20 + outliers 2 (16 + 8)/20 a channel + factors 32/64 + 32/20;
    # values: 4 + 32/128 + 2 (16 + 8)/128 + 32/64 + 32/20.
    Case("gear", "gear", 8.4125),
    # The same, with a third of the share for numbers that belong to a block.
    Case("gear-60", "gear", 6.0125, {"block": 60}, contract=True),
    # Keys as in `gear`: 10.1; values without factors: 2 + 32/128 + 2 (16 + 8)/128.
    Case("gear-keys-rank", "gear", 6.3625, {"bits": {"keys": 4, "values": 2}, "rank": {"keys": 4, "values": 0}}),
    Case("gear-per-head", "gear", 8.725, {"per_head": True}),
    # A block is one matrix of 20 x 128 values: 32/2560 for its range, 50 outliers of 32 bits, rank 1: factors of 20 + 128 numbers.
    Case("gear-paper", "gear", 5.5625, {"variant": "paper"}, contract=True),
    Case("gear-kivi", "gear", 4.0625, {"backbone": "kivi"}),
    Case(
        "gear-calibrated",
        "gear",
        5.4791667,
        {"statistics": "calibrated", "block": 60},
        artifact=True,
        contract=True,
    ),
    Case("gear_l", "gear_l", 7.025),
    Case("uniform", "uniform", 4.0125),
    Case("group_wise", "group_wise", 5.6),
    Case("outlier_reduced", "outlier_reduced", 5.6125),
    # The same corrections over other methods. Of a block, 36 and 24 tokens go to the two tiers and share a factor in each.
    Case(
        "zipcache-corrected",
        "zipcache",
        5.4083333 + 0.8,
        {"recompress": 60, "corrections": {"outliers": 0.02, "rank": 2, "decode_rank": 1}},
        contract=True,
    ),
    Case(
        "mikv-corrected",
        "mikv",
        4.5,
        {"balancer": False, "corrections": {"outliers": 0.02, "rank": 2, "statistics": "calibrated"}},
        artifact=True,
    ),
    Case("kivi-corrected", "kivi", 3.75, {"residual": 32, "corrections": {"outliers": 0.05}}),
    # 8 coefficients of 16 bits and 8 indices of 9: without an artifact 2 KV heads have 512 atoms.
    Case("csr", "csr", 3.125),
    # 64 atoms, 6 bits an index.
    Case("csr-short", "csr", 2.75, {"online": 64, "window": 20, "block": 8}, contract=True),
    # 96 atoms, 7 bits; 4 bits a coefficient, and 16 for their scale.
    Case(
        "csr-offline",
        "csr",
        1.625,
        {"online": 0, "coefficients": 4, "window": 8, "block": 24},
        artifact=True,
        contract=True,
    ),
    # 160 atoms: indices of 8 bits, and coefficients of 8.
    Case("csr-both", "csr", 2.0, {"online": 64, "coefficients": "fp8", "pursuit": "orthogonal"}, artifact=True),
    Case("csr-paper", "csr", 2.0, {"sparsity": 4, "index": "int16", "online": 64, "window": 0, "block": 1}),
    # A fifth at 352 bits a token and head, the rest at 88, and every token's position: 32/(2 * 64).
    Case("csr-tiers", "csr", 2.45, {"tiers": [[16, 0.2], [4, 0.8]], "online": 64, "block": 40}, contract=True),
    # 88 bits, two outliers of 24, codes of 2 bits with 32 for their range.
    Case(
        "csr-corrected",
        "csr",
        4.625,
        {"sparsity": 4, "online": 64, "window": 0, "block": 20, "corrections": {"outliers": 0.02, "residual_bits": 2}},
        contract=True,
    ),
    # The budget, which is allocated in whole words of 16 bits.
    Case(
        "klt-short",
        "klt",
        1.25,
        {"bits": 1.25, "window": 20, "block": 8, "size": False},
        artifact=True,
        contract=True,
    ),
    Case(
        "klt-after-rope",
        "klt",
        3.0,
        {"bits": 3.0, "rope": "after", "sinks": 2, "window": 0, "block": 10},
        artifact=True,
        contract=True,
    ),
    Case(
        "klt-predicted",
        "klt",
        2,
        {"bits": 2, "size": True, "predict": True, "trellis": False, "window": 20, "block": 8},
        artifact=True,
        contract=True,
    ),
    # A fifth at 3 bits, the rest at 1, and every token's position: 32/(2 * 64).
    Case(
        "klt-predicted-tiers",
        "klt",
        1.65,
        {"tiers": [[3, 0.2], [1, 0.8]], "size": True, "predict": True, "trellis": False, "block": 20},
        artifact=True,
    ),
    # The budget: a code of b bits is one path bit and b - 1 free ones.
    Case(
        "klt-trellis",
        "klt",
        2,
        {"bits": 2, "size": True, "predict": True, "trellis": True, "window": 20, "block": 8},
        artifact=True,
        contract=True,
    ),
    Case(
        "klt-trellis-tiers",
        "klt",
        1.6,
        {"tiers": [[4, 0.2], [1, 0.8]], "sinks": 2, "block": 20, "rope": "after", "trellis": True},
        artifact=True,
    ),
    Case(
        "klt-tiers",
        "klt",
        1.65,
        {"tiers": [[3, 0.2], [1, 0.8]], "block": 20, "size": False},
        artifact=True,
        contract=True,
    ),
    # A fifth at 4 bits, the rest at 1. Keys are stored after RoPE, so positions are not.
    Case(
        "klt-after-rope-tiers",
        "klt",
        1.6,
        {"tiers": [[4, 0.2], [1, 0.8]], "sinks": 2, "block": 20, "rope": "after"},
        artifact=True,
    ),
    # Two outliers of 16 bits and an index of 8 for the 128 channels of a token, and of values 32 bits for its range.
    Case("kvquant", "kvquant", 4.5, artifact=True, contract=True),
    # 3 bits: 13 words of 5 codes; values have a range.
    Case("kvquant-3-dense", "kvquant", 3.375, {"bits": 3, "outliers": 0, "sinks": 3}, artifact=True),
    # Everything is in host memory, nothing on the device.
    Case("offload", "offload", 0.0, contract=True),
    # The low-bit copy alone: there is memory for 16 fetched tokens, whatever the length.
    Case("specache", "specache", 3.0, {"k": 16, "residual": 32}, contract=True),
    Case("specache-late", "specache", 3.0, {"k": 16, "residual": 32, "speculative": False}, contract=True),
    Case("specache-rotated", "specache", 3.0, {"k": 16, "residual": 32, "basis": "calibrated"}, artifact=True),
    # On the device, 2 of a block's 8 keys at 16 bits, and no values.
    Case("infllm", "infllm", 2.0, {"initial": 8, "window": 40, "block": 8, "representatives": 2, "fetched": 3}),
    Case(
        "infllm-blocks",
        "infllm",
        2.0,
        {"initial": 8, "window": 40, "block": 8, "representatives": 2, "fetched": 3, "chunk": 24},
    ),
    Case(
        "infllm-original",
        "infllm",
        0.66666667,
        {
            "initial": 4,
            "window": 12,
            "block": 12,
            "representatives": 1,
            "fetched": 1,
            "positions": "original",
            # Prefill by blocks is not full attention over the prompt: tests/runtime/test_block_prefill.py tests it.
            "prefill": "exact",
        },
        contract=True,
    ),
    # 2.5, and the same again for the quantised residual.
    Case("rtn-twice", "rtn", 5.0, {"bits": 2, "corrections": {"residual_bits": 2}}),
]

BY_NAME = {case.name: case for case in CASES}


@cache
def _small_model() -> PreTrainedModel:
    return random_model("llama-64")


def calibrated_artifact(model: PreTrainedModel) -> Artifact:
    """An artifact with every tensor that methods read: random, of plausible size for `model`, without symmetric or equal parts."""
    shape = astuple(Geometry.of(model.config))
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for stream in ("keys", "values"):
        tensors[f"{stream}.low"] = -1 - 2 * torch.rand(shape, generator=draw)
        tensors[f"{stream}.high"] = 1 + 2 * torch.rand(shape, generator=draw)
        for form in ("32x1", "1x32", "1x*", "fixed", "scaled.1x32"):
            clip = 0.6 + 0.4 * torch.rand(*shape[:2], len(CLIP_BITS), generator=draw)
            tensors[f"{stream}.clip.{form}"] = clip
    for name in ("values.scale", "keys.balancer"):
        tensors[name] = 0.5 + torch.rand(shape, generator=draw)
    tensors |= toy_thresholds(shape, (0.02, 0.05, 0.1), draw)
    for form in residual_forms(shape[2], RESIDUAL_FORMS):
        for bits in RESIDUAL_BITS:
            tensors[f"{form.stream}.residual.{form.name}.{bits}"] = toy_basis(shape, min(8, shape[2]), draw)
    tensors |= toy_dictionaries(shape, 96, draw)
    tensors |= toy_components(shape, draw)
    tensors |= toy_rotations(shape, draw)
    tensors |= toy_levels(shape, (0.0, 0.01), draw)
    tensors |= toy_predictions(tensors, draw)
    return toy_artifact(model, tensors=tensors, clip_bits=CLIP_BITS)
