"""GEAR, and its variants without some of its parts, against the equations in float64, forward by forward."""

from typing import Any

import pytest
import torch
from gear.scenarios import WALKS, Scenario, walk_beside
from in_turn import a_part

pytestmark = pytest.mark.arithmetic

BF16 = torch.bfloat16


def gear(walk: str = "steps", gqa: int = 2, dtype: torch.dtype = torch.float32, data: str = "random", **options: Any):
    sliding = options.pop("sliding", None)
    return Scenario("gear", options, walk, gqa, dtype, data, sliding)


def preset(method: str, walk: str = "steps", gqa: int = 2, dtype: torch.dtype = torch.float32, **options: Any):
    sliding = options.pop("sliding", None)
    return Scenario(method, options, walk, gqa, dtype, sliding=sliding)


KIVI, CHANNEL, UNIFORM, PAPER = (
    {"backbone": "kivi"},
    {"backbone": "channel"},
    {"backbone": "uniform"},
    {"variant": "paper"},
)
SCENARIOS = [
    gear(),
    gear(gqa=1, bits=2),
    gear(gqa=4, bits=3, per_head=True),
    gear("short prompt"),
    gear("short prompt", gqa=1, per_head=True, bits=2),
    gear("just a block", gqa=4),
    gear("turns"),
    gear("turns", gqa=4, rank=7, decode_rank=3),
    gear("turns", outliers=0.1, block=10),
    gear("from one", gqa=1),
    gear("pages"),
    gear("turns", bits=8),
    gear("turns", rank=40, decode_rank=40),  # more than there are channels, or tokens of a block
    gear("turns", rank=0.1, decode_rank=0.1),
    gear("turns", rank=0),
    gear("turns", decode_rank=0),
    gear("turns", dtype=BF16),
    gear("short prompt", gqa=4, dtype=BF16, bits=2),
    gear("steps", gqa=1, dtype=BF16, per_head=True),
    gear("turns", **CHANNEL),
    gear("steps", gqa=1, dtype=BF16, bits=2, **CHANNEL),
    gear("turns", **UNIFORM),
    gear("short prompt", gqa=4, bits=2, **UNIFORM),
    gear("blocks", **KIVI),
    gear("short of 64", gqa=1, **KIVI),
    gear("short of 64", gqa=4, bits=4, per_head=True, **KIVI),
    gear("thirty-two", block=32, group=32, **KIVI),
    gear("thirty-two", gqa=4, block=32, group=16, **KIVI),
    gear("blocks", gqa=4, dtype=BF16, **KIVI),
    gear(**PAPER),
    gear("turns", gqa=1, **PAPER),
    gear("turns", rank=0.05, decode_rank=0.1, **PAPER),
    gear("short prompt", gqa=4, bits=2, **PAPER),
    gear("turns", dtype=BF16, **PAPER),
    gear("turns", gqa=4, rank=4, decode_rank=2, backbone="kcvt", **PAPER),
    gear("blocks", **KIVI, **PAPER),
    gear("pages", gqa=1, **PAPER),
    # Different options for keys and values (appendix D.1), and one stream without a part that the other has.
    gear("turns", rank={"keys": 6, "values": 1}),
    gear("short prompt", gqa=4, rank={"keys": 0, "values": 4}, decode_rank={"keys": 0, "values": 1}),
    gear("steps", gqa=1, bits={"keys": 4, "values": 2}, outliers={"keys": 0.05, "values": 0.0}),
    gear("turns", bits={"keys": 2, "values": 8}, rank={"keys": 0.1, "values": 0.02}, **PAPER),
    gear("turns", outliers={"keys": 0.0, "values": 0.1}, rank={"keys": 4, "values": 0}, **PAPER),
    gear("thirty-two", block=32, group={"keys": 16, "values": 32}, bits={"keys": 4, "values": 2}, **KIVI),
    gear(
        "turns",
        statistics="calibrated",
        bits={"keys": 4, "values": 2},
        outliers={"keys": 0.02, "values": 0.1},
        rank={"keys": 4, "values": 2},
    ),
    gear("turns", statistics="calibrated", outliers={"keys": 0.0, "values": 0.02}, data="outlying"),
    gear("turns", statistics="calibrated", outliers={"keys": 0.02, "values": 0.0}, gqa=1),
    preset("uniform", "turns", bits={"keys": 4, "values": 2}),
    preset("group_wise", "turns", gqa=4, dtype=BF16, bits={"keys": 2, "values": 4}),
    preset("outlier_reduced", "turns", outliers={"keys": 0.1, "values": 0.02}, bits={"keys": 4, "values": 3}),
    *(gear("turns", data=data) for data in ("coherent", "dead", "constant", "outlying")),
    *(gear("turns", dtype=BF16, data=data) for data in ("dead", "outlying")),
    *(gear("turns", data=data, **PAPER) for data in ("coherent", "dead", "constant", "outlying")),
    *(gear("blocks", data=data, **KIVI) for data in ("dead", "constant")),
    gear("steps", data="outlying", bits=2, **CHANNEL),
    gear("turns", data="huge"),
    gear("turns", data="huge", **PAPER),
    gear("turns", seed=2**32 + 5),
    gear("turns", statistics="calibrated"),
    gear("turns", gqa=1, per_head=True, statistics="calibrated", outliers=0.1),
    gear("turns", gqa=4, rank=3, statistics="calibrated", **PAPER),
    gear("short prompt", dtype=BF16, statistics="calibrated", **CHANNEL),
    gear("blocks", statistics="calibrated", **KIVI),
    gear("turns", gqa=4, bits=2, statistics="calibrated", rank=2, **UNIFORM),
    *(gear("turns", data=data) for data in ("zero", "same")),
    gear("turns", data="zero", **PAPER),
    gear("from one", block=1),
    gear("short prompt", block=3, outliers=1.0),
    gear("turns", rank=0.29),
    gear("turns", statistics="calibrated", outliers=0.0),
    preset("gear_l"),
    preset("gear_l", "turns", gqa=4, bits=2),
    preset("gear_l", "short of 64", gqa=1, backbone="kivi"),
    preset("gear_l", "turns", dtype=BF16),
    preset("uniform"),
    preset("uniform", "turns", gqa=1, bits=2),
    preset("uniform", "short prompt", dtype=BF16, bits=8),
    preset("group_wise"),
    preset("group_wise", "turns", gqa=4, bits=2),
    preset("group_wise", "short prompt", gqa=1, dtype=BF16),
    preset("outlier_reduced"),
    preset("outlier_reduced", "turns", gqa=4, bits=2),
    preset("outlier_reduced", "short prompt", gqa=1, outliers=0.1),
    preset("outlier_reduced", "turns", dtype=BF16),
    # A sliding window shorter than prompts, and longer than the first one.
    gear("turns", sliding=48),
    gear("steps", gqa=4, dtype=BF16, sliding=137),
    gear("thirty-two", block=32, group=32, sliding=48, **KIVI),
    gear("turns", gqa=1, sliding=20, **PAPER),
    preset("outlier_reduced", "from one", sliding=7),
]


@pytest.mark.parametrize("scenario", a_part(SCENARIOS))
def test_a_row_does_what_the_equations_say(scenario):
    sizes = WALKS[scenario.walk]
    walk_beside(scenario, [[size] for size in sizes], [scenario.tokens(sizes)])


# Tokens of each row in each forward: prompts of several blocks and of less than one, rows that begin later (with padding, or
# beside rows that add as many tokens to those they hold), turns of any size.
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
    gear(),
    gear(bits=2, gqa=4, per_head=True),
    gear(dtype=BF16),
    gear(**KIVI),
    gear(gqa=1, **PAPER),
    preset("gear_l", gqa=1),
    preset("uniform"),
    preset("group_wise", dtype=BF16),
    preset("outlier_reduced", gqa=4),
    gear(sliding=48),
]


@pytest.mark.parametrize("scenario", BATCH, ids=str)
def test_rows_of_a_ragged_batch(scenario):
    rows = [scenario.tokens(column, row) for row, column in enumerate(zip(*ROUNDS, strict=True))]
    walk_beside(scenario, ROUNDS, rows)


@pytest.mark.full
@pytest.mark.parametrize("scenario", [gear("pages"), gear("pages", gqa=1, **PAPER), gear("pages", **UNIFORM)], ids=str)
def test_a_prompt_of_several_tiles(scenario, monkeypatch):
    """The prompt's record (outliers, factors) is applied tile by tile: 300 tokens, 128 or 64 at a time."""
    for size in (128, 64):
        monkeypatch.setattr("calib.runtime.tiered.tier.tile_tokens", lambda heads, channels, size=size: size)
        sizes = WALKS[scenario.walk]
        walk_beside(scenario, [[size] for size in sizes], [scenario.tokens(sizes)])


@pytest.mark.parametrize("scenario", [gear(), gear(gqa=1, **PAPER)], ids=str)
def test_rows_of_a_ragged_batch_in_several_tiles(scenario, monkeypatch):
    """The shorter rows end in earlier tiles than the longest."""
    monkeypatch.setattr("calib.runtime.tiered.tier.tile_tokens", lambda heads, channels: 128)
    rounds = [[200, 20, 130], [1, 1, 1], [3, 0, 40]]
    rows = [scenario.tokens(column, row) for row, column in enumerate(zip(*rounds, strict=True))]
    walk_beside(scenario, rounds, rows)
