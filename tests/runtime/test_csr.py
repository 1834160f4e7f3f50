"""CSR against its equations in float64, forward by forward: what is stored of every token, and attention over that."""

import math
from functools import partial
from typing import Any

import layer_walk
import pytest
import torch
from csr.scenarios import WALKS, Scenario, walk_beside
from importance.layer import LayerOracle
from in_turn import a_part
from layer_walk import Tokens, feed
from rope_types import ROPE_TYPES

from calib.runtime.logits import Logits

pytestmark = pytest.mark.arithmetic

BF16 = torch.bfloat16
SHORT = {"window": 8, "block": 4}
TIERS = [[16, 0.2], [4, 0.8]]
THREE = [[16, 0.1], [8, 0.3], [4, 0.6]]


def csr(
    walk: str = "steps", gqa: int = 2, atoms: int = 64, dtype: torch.dtype = torch.float32, **rest: Any
) -> Scenario:
    """A scenario of CSR: options of the method in `rest`, and the scenario's own fields."""
    own = {name: rest.pop(name) for name in ("data", "merged", "tokens_seed", "changes", "sliding") if name in rest}
    return Scenario(rest, walk, gqa, dtype, atoms=atoms, **own)


HEAD_64 = {"head_dim": 64}
FP16 = torch.float16
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
LLAMA3, YARN, LINEAR = ({"rope_parameters": ROPE_TYPES[name].parameters} for name in ("llama3", "yarn", "linear"))
SCENARIOS = [
    csr(),
    # s and chunks: 4 / 4 is one pair of eight channels.
    *(csr(sparsity=s, value_chunks=c) for s in (4, 8, 16) for c in (1, 2, 4)),
    *(csr(walk, sparsity=8, key_chunks=c, **more) for c in (2, 4) for walk, more in (("steps", {}), ("turns", {"atoms": 0}))),
    csr("turns", sparsity=16, key_chunks=4, value_chunks=1, gqa=4, pursuit="orthogonal", online=40),
    csr("turns", sparsity=4, key_chunks=4, value_chunks=4, coefficients=4, index="int16", dtype=BF16),
    csr("pages", sparsity=8, key_chunks=2, gqa=1, changes=HEAD_64, online=40, merged=True),
    csr("turns", sparsity=8, key_chunks=2, changes=PARTIAL, atoms=0, online=40),
    csr("short", sparsity=1, value_chunks=1, **SHORT),
    csr("short", sparsity=32, value_chunks=1, atoms=128, **SHORT),  # as many steps as channels
    csr("turns", sparsity=6, gqa=4),
    # Online atoms: none, as many as the artifact's, twice as many; none of the artifact's; fewer and more than there are vectors.
    csr(online=0),
    csr(online=128),
    csr(online=256, gqa=1),
    csr(online="offline", gqa=4, window=0, block=1, index="int16", corrections={"outliers": 0.02}),  # csr_paper.yaml
    csr("turns", online=40),
    csr("turns", online=41, gqa=4, merged=True),
    csr("turns", online=1, sparsity=4),
    csr(atoms=0),
    csr("turns", atoms=0, gqa=4),
    csr("turns", atoms=0, gqa=1, online=33, sparsity=16),
    csr("short", atoms=0, online=50, value_chunks=4, **SHORT),
    csr("tiny", atoms=0, online=5, **SHORT),
    csr("tiny", atoms=0, online=1, value_chunks=1, **SHORT),
    csr("pages", atoms=0, online=300, changes=HEAD_64),
    csr("pages", online=64, seed=2**32 + 5),
    csr("steps", atoms=0, online=30, seed=3),
    # Different options for keys and values.
    csr("turns", sparsity={"keys": 8, "values": 4}),
    csr("turns", sparsity={"keys": 3, "values": 10}, coefficients=4, gqa=4, atoms=0, online=40),
    csr("short", sparsity={"keys": 1, "values": 8}, value_chunks=4, pursuit="orthogonal", index="int16", **SHORT),
    # Shares of the two samplings of online atoms: one alone, with and without the artifact's atoms; shares that do not divide.
    *(csr("turns", online=40, reverse_share=share, **more) for share in (0, 1) for more in ({}, {"atoms": 0})),
    csr("turns", online=41, reverse_share=0.25, gqa=4),
    csr("turns", online=100, reverse_share=0.29, atoms=0, pursuit="orthogonal"),
    csr("tiny", atoms=0, online=1, reverse_share=0.9, value_chunks=1, **SHORT),
    csr("pages", atoms=0, online=300, reverse_share=0.8, key_chunks=2, seed=5),
    # Coefficients.
    *(csr("turns", coefficients=kind) for kind in ("fp16", "fp8", 8, 4, 2)),
    *(csr("short", coefficients=bits, value_chunks=chunks, **SHORT) for bits, chunks in ((3, 1), (5, 4), (6, 2), (7, 4))),
    *(csr("turns", online=40, atoms=0, coefficients=kind) for kind in ("fp8", 8, 4)),
    *(csr("turns", coefficients=kind, dtype=BF16) for kind in ("fp8", 4)),
    csr("turns", online=40, coefficients=4, value_chunks=4, gqa=4),
    # Indices.
    csr("turns", index="int16"),
    csr("turns", index="int16", online=40, coefficients=8, value_chunks=4),
    csr("turns", index="packed", atoms=60, online=9),  # 129 atoms: 8 bits
    csr("short", index="packed", atoms=0, online=3, **SHORT),
    csr("short", atoms=20_000, sparsity=4, **SHORT),  # 40,000 atoms: an index of 16 bits has no sign
    csr("short", atoms=20_000, sparsity=4, index="int16", **SHORT),
    # Pursuit.
    csr("turns", pursuit="orthogonal"),
    csr("turns", pursuit="orthogonal", sparsity=16, value_chunks=4, gqa=1),
    csr("turns", pursuit="orthogonal", online=40),
    csr("turns", pursuit="orthogonal", online=40, atoms=0, gqa=4),
    csr("turns", pursuit="orthogonal", coefficients=4, dtype=BF16),
    csr("turns", pursuit="orthogonal", coefficients="fp8", sparsity=4),
    # Prompts.
    *(csr(walk, **more) for walk in ("below window", "below block", "from one") for more in ({}, {"online": 40})),
    csr("just a window", gqa=4, atoms=0),
    csr("below window", dtype=BF16, online=20, atoms=0),
    csr("pages", gqa=4),
    csr("tiny", **SHORT),
    csr("tiny", window=0, block=1),
    csr("turns", window=0, block=7, online=20),
    csr("turns", window=1, block=64),
    csr("turns", window=200),
    # Models.
    csr(gqa=1, changes=HEAD_64),
    csr("turns", gqa=4, changes=HEAD_64, online=50),
    csr("turns", gqa=1, dtype=BF16),
    csr("turns", gqa=4, dtype=BF16, online=40),
    csr("steps", dtype=BF16, atoms=0),
    csr("turns", gqa=1, dtype=FP16, online=40),
    csr("turns", merged=True),
    csr("turns", changes=PARTIAL),
    csr("turns", changes=PARTIAL, online=40, atoms=0, gqa=4),
    csr("turns", changes=LLAMA3, online=40),
    csr("turns", changes=YARN, gqa=1),
    csr("short", changes=LINEAR, **SHORT),
    csr("long", gqa=4),
    csr("long", gqa=4, atoms=0, online=100),
    # A sliding window shorter than prompts, and longer than the first one.
    csr("turns", sliding=48),
    csr("steps", online=40, gqa=4, dtype=BF16, sliding=137),
    csr("from one", online=40, atoms=0, sliding=30),
    # Tokens.
    *(csr("turns", data=data) for data in ("coherent", "dead", "constant", "outlying", "zero", "same", "huge")),
    *(csr("turns", data=data, atoms=0, online=40) for data in ("coherent", "dead", "constant", "outlying", "zero", "huge")),
    *(csr("turns", data=data, coefficients=4, dtype=BF16) for data in ("dead", "zero")),
    csr("turns", data="outlying", coefficients=4, dtype=BF16, tokens_seed=2),
    *(csr("turns", data=data, pursuit="orthogonal") for data in ("dead", "zero", "outlying")),
    *(csr("turns", data="huge", coefficients=kind) for kind in ("fp8", 8)),
]  # fmt: skip
TIERED = [
    csr("tiers", tiers=TIERS),
    csr("tiers", tiers=TIERS, gqa=1, online=60),
    csr("tiers", tiers=TIERS, gqa=4, atoms=0, online=60),
    csr("tiers", tiers=TIERS, block=32),
    csr("tiers", tiers=THREE, block=32, coefficients=4, online=40),
    csr("tiers", tiers=TIERS, block=32, pursuit="orthogonal", value_chunks=4),
    csr("tiers", tiers=TIERS, block=32, dtype=BF16, coefficients="fp8"),
    csr("waiting tiers", tiers=TIERS, block=32, online=40),
    csr("tiers", tiers=[[{"keys": 16, "values": 4}, 0.25], [{"keys": 2, "values": 4}, 0.75]], block=32, online=40),
    csr("waiting tiers", tiers=THREE, block=20, gqa=4),
    csr("from one", tiers=TIERS, block=32),
    csr("tiers", tiers=[[8, 1.0]], block=32, online=40),
    csr("tiers", tiers=TIERS, block=32, key_chunks=4, online=40, reverse_share=0.75, tokens_seed=1),
    csr("pages", tiers=TIERS, block=32, index="int16", seed=7),
    csr("tiers", tiers=TIERS, block=32, sliding=48),
    *(csr("tiers", tiers=TIERS, block=32, probes=kind, probe_share=0.3) for kind in ("all", "random", "recent")),
]
CORRECTED = [
    csr("turns", corrections={"outliers": 0.02}),
    csr("turns", corrections={"outliers": 0.25}, gqa=4, sparsity=4),
    csr("turns", corrections={"residual_bits": 1}, sparsity=4),
    csr("turns", corrections={"residual_bits": 2}),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}, key_chunks=2, online=40, reverse_share=0),
    csr("turns", corrections={"residual_bits": 2, "residual_group": 8}, gqa=1),
    csr("turns", corrections={"residual_bits": 4, "residual_group": 16}, sparsity=4, coefficients=4),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 3}, online=40),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}, online=40, atoms=0, gqa=4),
    csr("below window", corrections={"outliers": 0.1, "residual_bits": 1, "residual_group": 32}),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}, data="dead"),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}, data="outlying"),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}, pursuit="orthogonal", coefficients="fp8"),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}, data="huge"),
    csr("turns", corrections={"outliers": 0.1, "residual_bits": 2}, dtype=BF16, coefficients=8),
    csr("tiers", corrections={"residual_bits": 2}, tiers=TIERS, block=32),
    csr("tiers", corrections={"outliers": 0.05, "residual_bits": 2}, tiers=TIERS, block=32, online=40),
]


@pytest.mark.parametrize("scenario", a_part(SCENARIOS + TIERED + CORRECTED))
def test_a_row_does_what_the_equations_say(scenario):
    sizes = WALKS[scenario.walk]
    walk_beside(scenario, [[size] for size in sizes], [scenario.tokens(sizes)])


@pytest.mark.parametrize(
    "scenario", [csr("turns"), csr("turns", online=40, gqa=4), csr("tiers", tiers=TIERS, block=32)], ids=str
)
def test_logits_with_a_soft_cap(scenario, monkeypatch):
    """As Gemma 2 computes them."""
    monkeypatch.setattr(LayerOracle, "softcap", 5.0)
    monkeypatch.setattr(layer_walk, "Logits", partial(Logits, softcap=5.0))
    sizes = WALKS[scenario.walk]
    walk_beside(scenario, [[size] for size in sizes], [scenario.tokens(sizes)])


# Tokens of each row in each forward: prompts of several blocks and shorter than the window, rows that begin later (with padding,
# or beside rows that add as many tokens to those they hold), turns of any size.
ROUNDS = [
    [130, 12, 77, 0, 0],
    [1, 1, 1, 40, 0],
    [36] * 5,
    [3, 0, 40, 1, 2],
    *[[1] * 5] * 25,
    [2, 33, 0, 70, 20],
    *[[1] * 5] * 5,
]
BATCH = [
    csr(),
    csr(online=40, gqa=4),
    csr(atoms=0, online=100, dtype=BF16),
    csr(pursuit="orthogonal", coefficients=4, online=40, gqa=1),
    csr(window=8, block=4, coefficients="fp8", index="int16", online=300),
    csr(tiers=TIERS, block=32, online=40),
    csr(corrections={"outliers": 0.1, "residual_bits": 2}, online=40, atoms=0),
    csr(online=40, sliding=48),
]


@pytest.mark.full
@pytest.mark.parametrize("scenario", BATCH, ids=str)
def test_rows_of_a_ragged_batch(scenario):
    rows = [scenario.tokens(column, row) for row, column in enumerate(zip(*ROUNDS, strict=True))]
    walk_beside(scenario, ROUNDS, rows)


TILES = [csr("pages"), csr("pages", online=40, gqa=1), csr("pages", tiers=TIERS, block=32)]


@pytest.mark.full
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("scenario", TILES, ids=str)
def test_tokens_of_several_tiles(scenario, size, monkeypatch):
    """Pairs are decoded tile by tile: 300 tokens, 128 or 64 at a time."""
    monkeypatch.setattr("calib.runtime.tiered.tier.tile_tokens", lambda heads, channels: size)
    rounds = [[300, 20, 130], [1, 1, 1], [3, 0, 40], [80, 90, 1], [1, 1, 1]]
    rows = [scenario.tokens(column, row) for row, column in enumerate(zip(*rounds, strict=True))]
    walk_beside(scenario, rounds, rows)


def plane_bytes(pairs: int, bits: int) -> int:
    """Bytes of `pairs` numbers of some bits: planes of 8, 4, 2 and 1 bit, each in whole bytes."""
    planes = [8] * (bits // 8) + [plane for plane in (4, 2, 1) if bits & plane]
    return sum(math.ceil(pairs * plane / 8) for plane in planes)


@pytest.mark.parametrize(
    ("scenario", "atoms"),
    [
        (csr(), 128),
        (csr(sparsity=16, value_chunks=4), 128),
        (csr(sparsity=8, key_chunks=4), 128),
        (csr(sparsity={"keys": 8, "values": 4}), 128),
        (csr(sparsity={"keys": 3, "values": 10}, coefficients=4), 128),
        (csr(sparsity={"keys": 2, "values": 16}, index="int16", coefficients="fp8"), 128),
        (csr(online=1), 129),
        (csr(online="offline"), 256),
        (csr(online=128), 256),
        (csr(online=129), 257),
        (csr(atoms=0, online=1), 1),
        (csr(atoms=0, online=2), 2),
        (csr(atoms=0, online=3), 3),
        (csr(atoms=0), 512),
        (csr(atoms=20_000, sparsity=4), 40_000),
        (csr(index="int16"), 128),
        (csr(index="int16", coefficients="fp8"), 128),
        (csr(coefficients="fp8", sparsity=6), 128),
        *((csr(coefficients=bits, sparsity=s), 128) for bits in (2, 3, 4, 5, 7, 8) for s in (4, 6, 8)),
        (csr(coefficients=4, changes=HEAD_64), 128),
    ],
    ids=str,
)
def test_what_one_more_token_costs(scenario, atoms):
    """For each head s pairs of a coefficient and an index, of keys and of values; integer coefficients also have a 16-bit scale."""
    form, size = scenario.spec.coefficients, 0.0
    index = 16 if scenario.options.get("index") == "int16" else max(1, math.ceil(math.log2(atoms)))
    for pairs in map(scenario.spec.pairs, ("keys", "values")):
        size += plane_bytes(pairs, index) / 2
        size += ({"fp16": 2 * pairs, "fp8": pairs}[form] if isinstance(form, str) else plane_bytes(pairs, form) + 2) / 2
    cache = scenario.open()
    feed(cache, [scenario.tokens([100])])
    assert cache.memory().marginal_bits == pytest.approx(8 * size / scenario.model.config.head_dim)


def test_what_is_worst_is_found_with_atoms_as_they_are_stored():
    """Online atoms are sampled by their errors with atoms as stored: the fourth of 48 chunks of values is the 40th; with atoms that
    were not rounded yet it would be the 47th."""
    scenario = csr(sparsity=2, online=4, window=0, block=1, gqa=1, atoms=0)
    first, other = Tokens.random(scenario.model, 12, seed=2439052), scenario.tokens([12])
    tokens = Tokens(*(torch.cat([getattr(first, name)[:1], getattr(other, name)[1:]]) for name in vars(first)))
    walk_beside(scenario, [[12]], [tokens])
