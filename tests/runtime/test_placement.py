"""SpeCache, InfLLM and offload against their equations in float64, forward by forward."""

import pytest
import torch
from in_turn import a_part
from placement.scenarios import Scenario, by_blocks, infllm, offload, specache
from placement.walk import Walk
from rope_types import ROPE_TYPES

pytestmark = pytest.mark.arithmetic

BF16, FP16 = torch.bfloat16, torch.float16
CSR = {"method": "csr", "online": 40, "window": 16, "block": 8}
ZIPCACHE = {"method": "zipcache", "recompress": 20}
GEAR = {"method": "gear", "block": 20}
RTN = {"method": "rtn", "bits": 2}
CSR_TIERS = {"method": "csr", "online": 40, "tiers": [[16, 0.2], [4, 0.8]], "block": 20}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LLAMA3, YARN = (ROPE_TYPES[name].parameters for name in ("llama3", "yarn"))

SPECACHE = [
    specache(),
    *(specache("turns", gqa) for gqa in (1, 4)),
    specache("turns", layers=2),
    specache("no first guess"),
    specache("crossing"),
    specache("crossing", gqa=4, dtype=BF16, residual=64),
    specache("pages", k=64),
    specache("from one"),
    specache("rows", layers=2),
    *(specache("rows", gqa=4, low=low) for low in (CSR, ZIPCACHE)),
    specache("mixed"),
    specache("mixed", gqa=1, k=64),
    *(specache(walk) for walk in ("late", "late guess", "unequal", "many rows")),
    specache("drafts"),
    specache("drafts", layers=2, sliding=30, k=64),
    specache("drafts", gqa=4, low=ZIPCACHE),
    specache("drafts and guesses"),
    *(specache("guesses", k=k) for k in (0, 64)),
    *(specache("singles", k=k) for k in (0, 1, 64)),
    specache("mixed", k=1000),
    specache("turns", k=0, gqa=4),
    specache("mixed", k=1, gqa=4),
    specache("singles", gqa=4, speculative=False),
    specache("singles and turns", speculative=False),
    specache("singles and turns", gqa=1, k=64, residual=64, speculative=False),
    # The step's own value counts as a residual one, as in KIVI's algorithm 1; windows of keys and values differ.
    *(specache(walk, residual={"keys": 32, "values": 31}) for walk in ("crossing", "turns", "mixed")),
    specache("rows", residual={"keys": 32, "values": 31}, gqa=4, dtype=BF16),
    specache("turns", residual={"keys": 32, "values": 31}, sliding=48),
    specache("singles", residual={"keys": 32, "values": 70}, speculative=False),
    specache("mixed", bits={"keys": 1, "values": 3}, group={"keys": 16, "values": 8}),
    # Bits.
    specache("turns", bits=1),
    specache("mixed", bits=1, clip=0.8),
    specache("guesses", bits=4, group=16, residual=16),
    # Dtypes.
    *(specache(walk, gqa, BF16) for walk, gqa in (("turns", 2), ("singles", 4), ("mixed", 1))),
    specache("turns", dtype=BF16, k=64, bits=1),
    specache("turns", dtype=BF16, low=CSR),
    specache("turns", dtype=FP16),
    # Other low-bit copies.
    *(specache(walk, low=low) for walk in ("turns", "mixed") for low in (CSR, ZIPCACHE, GEAR, RTN)),
    specache("turns", low=CSR_TIERS, k=64),
    *(specache("turns", low=low, k=0) for low in (ZIPCACHE, ZIPCACHE | {"probes": "all"}, CSR_TIERS)),
    specache("turns", gqa=4, low=ZIPCACHE, k=64),
    specache("pages", low=GEAR, gqa=1),
    specache("turns", low={"method": "gear", "backbone": "kivi", "block": 64}),
    *(specache("singles", low=low, k=64, speculative=False) for low in (RTN, ZIPCACHE)),
    # Logits.
    specache("turns", softcap=5.0),
    specache("singles", softcap=5.0, gqa=4),
    specache("turns", sliding=48),
    specache("rows", sliding=30),
    specache("singles and turns", sliding=30, k=64),
    specache("pages", sliding=100, k=64),
    *(specache("turns", sliding=40, low=low) for low in (RTN, ZIPCACHE)),
    specache("rows", sliding=35, low=CSR),
    specache("turns", sliding=48, gqa=4, dtype=BF16),
    specache("singles", softcap=5.0, sliding=30, scale=0.3, k=64),
]

INFLLM = [
    *(infllm(walk) for walk in ("steps", "chunks", "ragged", "late rows", "long", "one by one", "rows of chunks")),
    *(infllm(walk, positions="original") for walk in ("steps", "ragged", "long", "rows of chunks")),
    infllm("steps", gqa=4),
    *(infllm("ragged", gqa) for gqa in (1, 4)),
    infllm("chunks", 4, positions="original"),
    infllm("ragged", layers=2),
    infllm("long", fetched=1, representatives=1),
    infllm("long", fetched=100, block=16, representatives=16),
    infllm("long", initial=20, window=64, block=13, representatives=4, gqa=4),
    infllm("ragged", initial=1, window=5, block=3, representatives=3),
    infllm("long", initial=9, window=30, block=7, gqa=4),  # blocks that no page holds whole
    infllm("ragged", initial=1, window=1, block=5, representatives=1),
    infllm("ragged", window=8, block=20),
    infllm("many chunks"),
    infllm("drafts"),
    infllm("drafts", 4, BF16, positions="original", sliding=40),
    infllm("ragged", softcap=5.0),
    infllm("steps", sliding=60),
    infllm("ragged", sliding=60, positions="original"),
    infllm("long", sliding=60, gqa=4),
    infllm("late rows", sliding=40),
    infllm("rows of chunks", sliding=40, dtype=BF16),
    infllm("ragged", softcap=5.0, sliding=50, scale=0.3),
    infllm("long", rope=PARTIAL),
    *(infllm("ragged", rope=rope) for rope in (LLAMA3, YARN)),
    infllm("long", dtype=FP16),
    *(infllm(walk, gqa, BF16) for walk, gqa in (("rows of chunks", 2), ("ragged", 4), ("long", 1))),
    infllm("ragged", dtype=BF16, positions="original"),
]

# Prompts, turns and padded rows of many chunks, whole and partial ones.
BLOCKS = [
    *(by_blocks(walk) for walk in ("steps", "chunks", "ragged", "late rows", "long", "one by one", "rows of chunks")),
    *(by_blocks("ragged", chunk) for chunk in (1, 7, 40, 1000)),
    *(by_blocks("ragged", gqa=gqa) for gqa in (1, 4)),
    by_blocks("long", 50, positions="original"),
    by_blocks("ragged", layers=2),
    by_blocks("long", 32, fetched=100, block=16, representatives=16),
    by_blocks("long", 5, initial=20, window=64, block=13, representatives=4, gqa=4),
    by_blocks("ragged", 9, initial=1, window=1, block=5, representatives=1),
    by_blocks("ragged", 30, initial=0, window=8, block=20),
    by_blocks("many chunks", 13),
    by_blocks("drafts", 8),
    by_blocks("ragged", softcap=5.0),
    by_blocks("long", sliding=60),
    by_blocks("ragged", sliding=60, positions="original"),
    by_blocks("long", rope=PARTIAL),
    by_blocks("rows of chunks", 7, sliding=40),
    by_blocks("ragged", sliding=30, rope=YARN),
    by_blocks("ragged", rope=LLAMA3),
    by_blocks("long", dtype=FP16),
    by_blocks("ragged", gqa=4, dtype=BF16),
]

OFFLOAD = [
    offload(),
    offload("long", gqa=4),
    offload("rows of chunks", gqa=1, dtype=BF16),
    offload("late rows", layers=2),
    offload("drafts"),
    offload("ragged", softcap=5.0),
    offload("long", sliding=100),
    offload("ragged", sliding=30, scale=0.3),
]


def check(walk: Walk) -> None:
    assert not walk.problems, "\n".join(walk.problems)
    assert walk.tally.ties <= 1 + walk.tally.choices / 200, (
        f"{walk.tally.ties} of {walk.tally.choices} choices are ties"
    )


@pytest.mark.full
@pytest.mark.parametrize("scenario", a_part(SPECACHE))
def test_specache(scenario: Scenario):
    walk = Walk(scenario).run()
    check(walk)
    if scenario.options["k"]:
        assert walk.tally.choices and walk.mattered > 10, "no fetched token mattered"


@pytest.mark.parametrize("scenario", INFLLM, ids=str)
def test_infllm(scenario: Scenario):
    walk = Walk(scenario).run()
    check(walk)
    assert walk.tally.choices, "there was never a block"


@pytest.mark.parametrize("scenario", BLOCKS, ids=str)
def test_infllm_by_blocks(scenario: Scenario):
    """Distances between queries and keys stay below initial + window + block + chunk, however long the row, as a prompt beyond
    the trained context needs."""
    walk = Walk(scenario).run()
    check(walk)
    options, furthest = scenario.options, max(row.furthest for rows in walk.rows for row in rows)
    assert furthest < options["initial"] + options["window"] + options["block"] + options["chunk"]
    assert walk.tally.choices, "there was never a block"


@pytest.mark.parametrize("scenario", OFFLOAD, ids=str)
def test_offload(scenario: Scenario):
    check(Walk(scenario).run())
