"""Scenarios of GEAR: options and forwards, in which a cache is compared with its oracle, row by row of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from cases import calibrated_artifact
from gear.layer import GearLayer
from gear.oracle import Spec, encode_segment
from gear.samples import real_like, spans, untie
from importance.scenarios import HEADS, computing
from layer_walk import Tokens, feed
from tolerances import ATTENTION, FLOAT32_ATTENTION, STORED
from toy_models import random_model

from calib.runtime import Artifact, compress
from calib.runtime.cache import CompressedCache

# An output may also differ by its `slack`: a factor of the low-rank part near the middle between two float16 numbers may be rounded
# to the other one when it is computed in float32 (one in a few hundred), and so may the outliers' distances, from which the
# low-rank part is subtracted. The slack is the change if every stored number were the next one, as independent errors. The oracle
# in float32 was within .61 of it over 12 seeds of each of fifty scenarios; a wrong start, nine loops too few, a rank too many, an
# outlier too few exceed it five times or more (tests/gear/test_oracle.py).
OUTPUT = {torch.float32: 2 * FLOAT32_ATTENTION, torch.bfloat16: ATTENTION[torch.bfloat16]}

LAYERS = 2  # starts of the power iteration differ between layers

WALKS: dict[str, list[int]] = {
    "steps": [130] + [1] * 45,
    "short prompt": [7] + [1] * 60,
    "just a block": [20] + [1] * 25,
    "turns": [80] + [1] * 5 + [90] + [1] * 30 + [41, 3],
    "from one": [1] * 45,
    "pages": [300] + [1] * 15 + [150, 1, 1],
    "blocks": [130] + [1] * 70 + [200] + [1] * 5,  # for blocks of 64
    "short of 64": [20] + [1] * 50 + [60, 5],
    "thirty-two": [70, 1, 1, 33, 1, 1],
}


@dataclass(frozen=True)
class Scenario:
    """A method with options and the forwards of a row (`walk`); `data` is the kind of tokens, a name in DATA. `sliding` is the
    model's sliding window."""

    method: str = "gear"
    options: dict[str, Any] = field(default_factory=dict)
    walk: str = "steps"
    gqa: int = 2
    dtype: torch.dtype = torch.float32
    data: str = "random"
    sliding: int | None = None

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        data = "" if self.data == "random" else self.data
        dtype = "" if self.dtype == torch.float32 else str(self.dtype).removeprefix("torch.")
        sliding = f"sliding {self.sliding}" if self.sliding else ""
        return ", ".join(filter(None, [self.method, options, self.walk, f"gqa {self.gqa}", dtype, data, sliding]))

    @property
    def logits(self) -> dict[str, Any]:
        """By which the model computes logits, where they are not the usual ones."""
        return {} if self.sliding is None else {"sliding": self.sliding}

    @cached_property
    def spec(self) -> Spec:
        return Spec.of(self.method, **self.options, wide=self.data == "huge")

    @cached_property
    def artifact(self) -> Artifact | None:
        return calibrated_artifact(self.model) if self.options.get("statistics") == "calibrated" else None

    def open(self) -> CompressedCache:
        """An empty cache, detached from the model."""
        options = {"seed": self.spec.seed} | self.options
        cache = compress(self.model, self.method, self.artifact, **options)
        cache.release()
        return cache

    def oracle(self, layer: int) -> GearLayer:
        """A new oracle of one row of one layer."""
        found = GearLayer(self.spec, layer, {stream: self.known(stream, layer) for stream in ("keys", "values")})
        found.sliding = self.sliding
        return found

    def known(self, stream: str, layer: int) -> dict[str, Any]:
        """A stream's calibrated thresholds and basis; empty without an artifact."""
        return {} if self.artifact is None else statistics_of(self.artifact, self.spec.of_stream(stream), stream, layer)

    @cached_property
    def model(self) -> Any:
        heads, kv_heads = HEADS[self.gqa]
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": LAYERS}
        if self.sliding is not None:
            return random_model("mistral-sliding", self.dtype, sliding_window=self.sliding, **shape)
        return random_model("llama", self.dtype, **shape)

    def tokens(self, sizes: Sequence[int], row: int = 0) -> Tokens:
        """A row's tokens for these forwards, whose codes and parameters float32 certainly rounds as float64 does."""
        layers = [self._layer(sizes, layer, 1000 * row + 500 * layer) for layer in range(LAYERS)]
        return Tokens(*(torch.stack([getattr(part, name)[0] for part in layers]) for name in vars(layers[0])))

    def _layer(self, sizes: Sequence[int], layer: int, first: int) -> Tokens:
        """One layer's tokens; each segment of a stream is drawn from the first seed without doubtful numbers."""
        tokens = self._drawn(sum(sizes), first)
        for stream in ("keys", "values"):
            for start, stop in spans(sizes, self.spec):
                for seed in range(first, first + 100):
                    part = getattr(self._drawn(sum(sizes), seed), stream)[0, :, start:stop].clone()
                    if self.artifact is None:
                        untie(part, self.spec, stream)
                    known = self.known(stream, layer)
                    if not encode_segment(part.double().numpy(), self.spec, stream, layer, not start, **known).doubts:
                        break
                else:
                    raise AssertionError(f"{stream} {start} ... {stop} of {self} are doubtful whatever the seed")
                getattr(tokens, stream)[0, :, start:stop] = part
        return tokens

    def _drawn(self, count: int, seed: int) -> Tokens:
        drawn = DATA[self.data](self.model, count, seed)
        return Tokens(*(part.to(self.dtype) for part in vars(drawn).values()))


def run(row: GearLayer, tokens: Tokens, sizes: Sequence[int], layer: int) -> list[np.ndarray]:
    """Feed one layer's tokens to the oracle in forwards of these sizes; returns the output of each."""
    at, outputs = 0, []
    for size in filter(None, sizes):
        new = (part[layer, :, at : at + size].double().numpy() for part in vars(tokens).values())
        outputs.append(row.forward(*new))
        at += size
    return outputs


# --- tokens -----------------------------------------------------------------------------------------------------------


def coherent(model: Any, count: int, seed: int) -> Tokens:
    """Tokens like `real_like`; queries are small, so that attention is spread over many tokens."""
    tokens, (layers, heads, _, channels) = Tokens.random(model, count, seed), model_shape(model)
    for number, part in enumerate((tokens.keys, tokens.values)):
        for layer in range(layers):
            part[layer] = torch.from_numpy(real_like((heads, count, channels), 2 * (seed * layers + layer) + number))
    tokens.queries *= 0.1
    return tokens


def model_shape(model: Any) -> tuple[int, int, None, int]:
    """The shape `[layers, kv_heads, None, D]` of the model's keys."""
    config = model.config
    return config.num_hidden_layers, config.num_key_value_heads, None, config.head_dim


def dead(model: Any, count: int, seed: int) -> Tokens:
    """Channels that are always 0, or always the same."""
    tokens = Tokens.random(model, count, seed)
    tokens.keys[..., 3], tokens.keys[..., 4], tokens.values[..., 5], tokens.queries[..., 6] = 0, 1.5, 0, 0
    tokens.keys[:, -1, :, 7] = 0
    return tokens


def constant(model: Any, count: int, seed: int) -> Tokens:
    """Keys are 1.5 and values .25 in tokens 20 ... 44; both are 0 in tokens 130 ... 169."""
    tokens = Tokens.random(model, count, seed)
    tokens.keys[:, :, 20:45], tokens.values[:, :, 20:45] = 1.5, 0.25
    tokens.keys[:, :, 130:170] = tokens.values[:, :, 130:170] = 0
    return tokens


def zero(model: Any, count: int, seed: int) -> Tokens:
    """The first hundred tokens are 0."""
    tokens = Tokens.random(model, count, seed)
    tokens.keys[:, :, :100] = tokens.values[:, :, :100] = 0
    return tokens


def same(model: Any, count: int, seed: int) -> Tokens:
    """All keys are 1.5 and all values .25, in every token and channel."""
    tokens = Tokens.random(model, count, seed)
    tokens.keys[:], tokens.values[:] = 1.5, 0.25
    return tokens


def outlying(model: Any, count: int, seed: int) -> Tokens:
    """Some tokens are 30 times as large, and some single entries are large; queries are a tenth."""
    tokens = Tokens.random(model, count, seed)
    tokens.queries *= 0.1
    tokens.keys[:, :, 5::37] *= 30
    tokens.values[:, :, 9::41] *= 30
    tokens.keys[:, 0, 11::13, 3] = 25.5
    tokens.values[:, -1, 2::17, 8] = -33.25
    return tokens


def huge(model: Any, count: int, seed: int) -> Tokens:
    """Keys and values beyond float16's range; queries are as much smaller."""
    tokens = Tokens.random(model, count, seed)
    return Tokens(tokens.queries / 5e4, tokens.keys * 5e4, tokens.values * 5e4)


DATA: dict[str, Callable[[Any, int, int], Tokens]] = {
    "random": Tokens.random,
    "coherent": coherent,
    "dead": dead,
    "constant": constant,
    "zero": zero,
    "same": same,
    "outlying": outlying,
    "huge": huge,
}


# --- driving ----------------------------------------------------------------------------------------------------------


def walk_beside(scenario: Scenario, rounds: Sequence[Sequence[int]], rows: Sequence[Tokens]) -> None:
    """Run a cache, and an oracle for each of its rows, through the same forwards; assert that outputs agree after each of them, and
    stored tokens and overflow counts at the end.

    `rounds[i][row]` is the number of new tokens of a row in forward i; shorter rows are padded.
    """
    cache = scenario.open()
    oracles = [[scenario.oracle(layer) for _ in rows] for layer in range(LAYERS)]
    at = [0] * len(rows)
    for number, sizes in enumerate(rounds):
        brought = [row[start : start + size] for row, start, size in zip(rows, at, sizes, strict=True)]
        with computing(scenario):
            outputs = feed(cache, brought, columns=max(sizes) + (len(set(sizes)) > 1))
        for layer in range(LAYERS):
            for row, new in enumerate(brought):
                if len(new):
                    error = beyond(outputs[layer][row], oracles[layer][row], new, layer)
                    assert error <= 1, (
                        f"forward {number} (at {at[row]}), row {row}, layer {layer}: {error:.2f} tolerances"
                    )
        at = [start + size for start, size in zip(at, sizes, strict=True)]
    for layer, compressed in zip(oracles, cache.compressed, strict=True):
        for row, oracle in enumerate(layer):
            assert not oracle.doubts
            check_stored(compressed.store, row, oracle)
        overflowed_outliers = sum(
            int(tier.overflowed_outliers) for tier in compressed.store.tiers if tier.overflowed_outliers is not None
        )
        assert overflowed_outliers == sum(
            part.overflow for oracle in layer for both in oracle.segments for part in both
        )


def check_stored(store: Any, row: int, oracle: GearLayer) -> None:
    """Assert that every decoded token differs from the oracle's x^ by at most twice its `unit` plus STORED of the largest value."""
    for number, found in enumerate(zip(*store.decoded(row), strict=True)):  # keys, values
        found, at = np.concatenate([part.double().numpy() for part in found], 1), 0
        assert found.shape[1] == oracle.encoded
        for both in oracle.segments:
            segment, expected = both[number], both[number].approximation
            error = abs(found[:, at : at + expected.shape[1]] - expected)
            assert (error <= 2 * segment.unit + STORED * abs(expected).max()).all(), (row, at, number)
            at += expected.shape[1]


def statistics_of(artifact: Artifact, spec: Spec, stream: str, layer: int) -> dict[str, Any]:
    """The calibrated thresholds and basis of a stream in a layer of an artifact."""
    whole = min(spec.group, artifact.fingerprint["head_dim"]) == artifact.fingerprint["head_dim"]
    form = {
        "uniform": "*x*",
        "channel": "*x1",
        "kcvt": "*x1" if stream == "keys" else "1x*",
        "kivi": f"{spec.group}x1" if stream == "keys" else "1x*" if whole else f"1x{spec.group}",
    }[spec.backbone]
    basis = artifact.tensors[f"{stream}.residual.{form}.{spec.bits}"][layer].numpy()
    return {"thresholds": thresholds_of(artifact, spec, stream, layer) if spec.outliers else None, "basis": basis}


def thresholds_of(artifact: Artifact, spec: Spec, stream: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The low and high outlier thresholds, `[kv_heads or 1, 1, D or 1]` each."""
    released = spec.variant == "released"
    kind = "channel" if released and stream == "keys" else "head" if released and spec.per_head else "layer"
    share = artifact.tensors["outliers.shares"].tolist().index(np.float32(spec.outliers))
    names = (f"{stream}.outliers.{kind}.{end}" for end in ("low", "high"))
    axes = {"channel": np.s_[:, None, :], "head": np.s_[:, None, None], "layer": np.s_[None, None, None]}[kind]
    low, high = (artifact.tensors[name][layer, ..., share].numpy()[axes] for name in names)
    return low, high


def beyond(output: torch.Tensor, oracle: GearLayer, new: Tokens, layer: int) -> float:
    """The largest error of one forward of one row, in tolerances."""
    (expected,) = run(oracle, new, [len(new)], layer)
    allowed = OUTPUT[output.dtype] * abs(expected).max() + oracle.slack + 1e-30  # tokens may be 0
    return float((abs(output.double().numpy() - expected).max(-1) / allowed).max())
