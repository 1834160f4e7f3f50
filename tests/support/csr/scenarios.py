"""Scenarios of CSR: options and forwards, in which a cache is compared with its oracle, row by row of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from csr.coder import Coder
from csr.dictionary import unclear
from csr.layer import CsrLayer, CsrTiers, layer_of
from csr.spec import Spec
from gear.oracle import Spec as CorrectedSpec
from gear.samples import untie
from gear.scenarios import DATA, run
from importance.scenarios import CLEAR, HEADS, computing
from layer_walk import Tokens, feed
from tolerances import ATTENTION, FLOAT32_ATTENTION
from toy_artifact import toy_artifact
from toy_models import COMMON, random_model
from transformers import StableLmConfig, StableLmForCausalLM

from calib.runtime import Artifact, compress
from calib.runtime.cache import CompressedCache

# The oracle attends to the cache's own stored tokens. Keys are rotated back and forth, which doubles the rounding in float32.
OUTPUT = ATTENTION | {torch.float32: 2 * FLOAT32_ATTENTION}

LAYERS = 2  # random draws and dictionaries differ between layers
STREAMS = ("keys", "values")
SEEDS, DRAWS = 20, 60  # attempts to draw tokens for which float32 certainly chooses the same dictionary

# Sizes of the forwards of a row, for the default window of 64 and blocks of 16; "short" and "tiny" for windows of 8 and blocks of
# 4.
WALKS: dict[str, list[int]] = {
    "steps": [130] + [1] * 33,
    "turns": [80] + [1] * 5 + [90] + [1] * 17 + [41, 3],
    "below window": [40] + [1] * 57,
    "below block": [70] + [1] * 27,
    "just a window": [64, 15, 1, 1, 16],
    "from one": [1] * 100,
    "pages": [300] + [1] * 17 + [150, 1, 1],
    "short": [60] + [1] * 15 + [22, 1, 7],
    "tiny": [3] + [1] * 25,
    "long": [1100] + [1] * 20 + [60, 1],
    "tiers": [130] + [1] * 40 + [70, 3, 1],
    "waiting tiers": [20] + [1] * 50 + [9],
}


@dataclass(frozen=True)
class Scenario:
    """Options of `csr` and the forwards of a row (`walk`). `atoms` is the artifact's atoms for each KV head; 0: no artifact.

    With `merged` both layers share one dictionary. `changes` override the model's configuration. `sliding` is the model's sliding
    window.
    """

    options: dict[str, Any] = field(default_factory=dict)
    walk: str = "steps"
    gqa: int = 2
    dtype: torch.dtype = torch.float32
    data: str = "random"
    atoms: int = 64
    merged: bool = False
    tokens_seed: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    sliding: int | None = None

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in {**self.options, **self.changes}.items()]
        dtype = "" if self.dtype == torch.float32 else str(self.dtype).removeprefix("torch.")
        data = "" if self.data == "random" else self.data
        rest = [dtype, data, "merged" * self.merged, f"sliding {self.sliding}" if self.sliding else ""]
        return ", ".join(filter(None, [*parts, self.walk, f"gqa {self.gqa}", f"atoms {self.atoms}", *rest]))

    @property
    def logits(self) -> dict[str, Any]:
        """By which the model computes logits, where they are not the usual ones."""
        return {} if self.sliding is None else {"sliding": self.sliding}

    @cached_property
    def model(self) -> Any:
        heads, kv_heads = HEADS[self.gqa]
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": LAYERS}
        if "partial_rotary_factor" in self.changes.get(
            "rope_parameters", {}
        ):  # of these families only StableLM has partial RoPE
            config = StableLmConfig(**COMMON | {"hidden_size": 32 * heads, "head_dim": 32} | shape | self.changes)
            return StableLmForCausalLM(config).to(self.dtype).eval()
        if self.sliding is not None:
            return random_model("mistral-sliding", self.dtype, sliding_window=self.sliding, **shape, **self.changes)
        return random_model("llama", self.dtype, **shape, **self.changes)

    @cached_property
    def spec(self) -> Spec:
        heads = self.model.config.num_key_value_heads
        online = 0 if self.atoms else 256 * heads
        known = {name: value for name, value in self.options.items() if name != "index"}
        if known.get("online") == "offline":
            known["online"] = self.atoms * heads
        return Spec(**{"online": online, "wide": self.data == "huge", "block": 100 if "tiers" in known else 16} | known)

    @cached_property
    def artifact(self) -> Artifact | None:
        if not self.atoms:
            return None
        return dictionaries(self.model, self.atoms, self.spec.value_chunks, self.merged, self.spec.key_chunks)

    def open(self) -> CompressedCache:
        """An empty cache, detached from the model."""
        cache = compress(self.model, "csr", self.artifact, **{"seed": self.spec.seed} | self.options)
        cache.release()
        return cache

    def oracle(self, layer: int) -> CsrLayer | CsrTiers:
        """A new oracle of one row of one layer."""
        found = layer_of(self.spec, layer, [self.offline(stream, layer) for stream in STREAMS], self.frequencies)
        found.sliding = self.sliding
        return found

    def offline(self, stream: str, layer: int) -> np.ndarray:
        """The artifact's atoms of a layer."""
        if self.artifact is None:
            return np.zeros((0, self.model.config.head_dim // self.spec.chunks(stream)))
        group = int(self.artifact.tensors[f"{stream}.layer_groups"][layer])
        return self.artifact.tensors[f"{stream}.dictionary"][group].double().numpy()

    @cached_property
    def frequencies(self) -> np.ndarray:
        return self.model.model.rotary_emb.inv_freq.double().numpy()

    # --- tokens for which float32 and float64 certainly give the same dictionary ---

    def tokens(self, sizes: Sequence[int], row: int = 0) -> Tokens:
        """A row's tokens for these forwards."""
        layers = [self._layer(list(filter(None, sizes)), layer, 1000 * row + 500 * layer) for layer in range(LAYERS)]
        return Tokens(*(torch.stack([getattr(part, name)[0] for part in layers]) for name in vars(layers[0])))

    def _layer(self, sizes: list[int], layer: int, first: int) -> Tokens:
        tokens, stop = self._drawn(sum(sizes), first), self.spec.first(sizes[0])
        for stream in STREAMS:
            if self.spec.online and stop <= sum(sizes):
                getattr(tokens, stream)[0] = self._agreed(stream, layer, sum(sizes), stop, first)
            if share := self.spec.corrections.get("outliers"):
                untie(
                    getattr(tokens, stream)[0],
                    CorrectedSpec.of("gear", outliers=share, per_head=True),
                    "values",
                )
        return tokens

    def _agreed(self, stream: str, layer: int, count: int, stop: int, first: int) -> torch.Tensor:
        """A stream's tokens `[kv_heads, count, D]` whose online atoms are certain."""
        for seed in range(first, first + SEEDS):
            part = getattr(self._drawn(count, seed), stream)[0].clone()
            self._cleared(part[:, :stop], stream, layer, seed)
            coder = self._coder(stream, layer)
            coder.measure(part[:, :stop].double().numpy())
            if coder.sure:
                return part
        raise AssertionError(f"{stream} of {self}: own atoms are doubtful whatever the seed")

    def _cleared(self, part: torch.Tensor, stream: str, layer: int, seed: int) -> None:
        """Redraw tokens of `part [kv_heads, F, D]` until float32 certainly normalises all of them to the same float16 atoms."""
        for again in range(DRAWS):
            coder, tokens = self._coder(stream, layer), part.double().numpy()
            doubt = (
                unclear(coder.items(tokens), coder.sizes(tokens)).reshape(part.shape[1], part.shape[0], -1).any(-1).T
            )
            if not doubt.any():
                return
            other = getattr(Tokens.random(self.model, part.shape[1], 10_000 + 100 * seed + again), stream)[0]
            scale = part.abs().max() / other.abs().max() if self.data == "huge" else 1
            part[torch.from_numpy(doubt)] = (other * scale).to(self.dtype)[torch.from_numpy(doubt)]
        raise AssertionError(f"{stream} of {self}: atoms stay doubtful")

    def _coder(self, stream: str, layer: int) -> Coder:
        return Coder(self.spec, stream, layer, self.offline(stream, layer), self.frequencies)

    def _drawn(self, count: int, seed: int) -> Tokens:
        drawn = DATA[self.data](self.model, count, seed + 7919 * self.tokens_seed)
        return Tokens(*(part.to(self.dtype) for part in vars(drawn).values()))


def dictionaries(model: Any, atoms: int, value_chunks: int, merged: bool = False, key_chunks: int = 1) -> Artifact:
    """An artifact with random unit atoms, `atoms` for each KV head: a dictionary for each layer, or with `merged` a shared one."""
    config, draw = model.config, torch.Generator().manual_seed(5)
    tensors = {}
    for stream, chunks in zip(STREAMS, (key_chunks, value_chunks), strict=True):
        groups = 1 if merged else config.num_hidden_layers
        shape = groups, atoms * config.num_key_value_heads, config.head_dim // chunks
        rows = torch.randn(shape, generator=draw)
        tensors[f"{stream}.dictionary"] = (rows / rows.norm(dim=-1, keepdim=True)).half()
        tensors[f"{stream}.layer_groups"] = torch.arange(config.num_hidden_layers).clamp(max=groups - 1)
    return toy_artifact(model, tensors=tensors, clip_bits=())


# --- driving ----------------------------------------------------------------------------------------------------------


def walk_beside(scenario: Scenario, rounds: Sequence[Sequence[int]], rows: Sequence[Tokens]) -> None:
    """Run a cache, and an oracle for each of its rows, through the same forwards; assert that outputs and stored tokens agree.

    `rounds[i][row]` is the number of new tokens of a row in forward i; shorter rows are padded.
    """
    cache = scenario.open()
    oracles = [[scenario.oracle(layer) for _ in rows] for layer in range(LAYERS)]
    at = [0] * len(rows)
    for number, sizes in enumerate(rounds):
        brought = [row[start : start + size] for row, start, size in zip(rows, at, sizes, strict=True)]
        with computing(scenario):
            outputs = feed(cache, brought, columns=max(sizes) + (len(set(sizes)) > 1))
        for layer, compressed in enumerate(cache.compressed):
            for row, new in enumerate(brought):
                if len(new):
                    where = f"forward {number} (at {at[row]}), row {row}, layer {layer}"
                    error = beyond(outputs[layer][row], oracles[layer][row], new, layer)
                    assert error <= 1, f"{where}: output off by {error:.2f} tolerances"
                    check_stored(compressed.store, row, oracles[layer][row], where)
        at = [start + size for start, size in zip(at, sizes, strict=True)]


def beyond(output: torch.Tensor, oracle: CsrLayer | CsrTiers, new: Tokens, layer: int) -> float:
    """The largest error of one forward of one row, in tolerances."""
    (expected,) = run(oracle, new, [len(new)], layer)
    assert oracle.sure, "own atoms in doubt, take other tokens"
    assert oracle.margin > CLEAR, f"selections {oracle.margin} apart, take other tokens"
    allowed = OUTPUT[output.dtype] * abs(expected).max() + 1e-30  # tokens may be 0
    return float(abs(output.double().numpy() - expected).max() / allowed)


def check_stored(store: Any, row: int, oracle: CsrLayer | CsrTiers, where: str) -> None:
    """Assert that every stored token is an x^ that float32 may give; the oracle continues with the cache's own tokens."""
    tiers = stored_tiers(store, row, len(oracle.bits))
    for tier, (keys, values) in enumerate(tiers):
        expected = [len(held) for held in oracle.tokens(tier)]
        assert [len(head) for head in keys] == expected, f"{where}: tier {tier} holds {keys.shape[1]}, not {expected}"
        for head in range(len(keys)):
            error = oracle.settle(tier, head, keys[head], values[head])
            assert error <= 1, f"{where}, tier {tier}, head {head}: x^ off by {error:.2f} tolerances"


def stored_tiers(store: Any, row: int, tiers: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Decoded keys and values `[kv_heads, count, D]` of each tier, its pools for the prompt and for later blocks joined."""
    found = [[part.double().numpy() for part in both] for both in store.decoded(row)]
    return [
        (np.concatenate([k for k, _ in found[tier::tiers]], 1), np.concatenate([v for _, v in found[tier::tiers]], 1))
        for tier in range(tiers)
    ]
