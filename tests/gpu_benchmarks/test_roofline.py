"""The page of roofline predictions: it shows its run's figures, its formulas give numbers worked out by hand, and its loops are
those that a decode step launches."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from last_bits import without_last_bits

from benchmarks.gpu.attend_alone import packed_bytes, tier
from benchmarks.gpu.decode_attention import TIERS, UNIFORM
from benchmarks.gpu.devices import COPY, DEVICES, NODE, Device
from benchmarks.gpu.inputs import queries, tokens
from benchmarks.gpu.layers import Heads, bare_layers, filled, forward
from benchmarks.gpu.loop_clocks import busy
from benchmarks.gpu.roofline import (
    CASES,
    PAGE,
    RESULT,
    ROOT,
    Case,
    attended,
    bytes_of_token,
    predicted,
)
from benchmarks.gpu.roofline_lists import AT_ONCE, MIXTURES, SCORES, listed, turns_of_stretch, turns_of_tile
from benchmarks.gpu.roofline_page import measured, page, runs
from benchmarks.gpu.targets import TARGETS
from calib.kernels.ahead_of_time import CAPABILITIES, NEWEST
from calib.kernels.attend.specialisations import SPECIALISATIONS

pytestmark = pytest.mark.arithmetic

RUN = json.loads(RESULT.read_text(encoding="utf-8"))
LOOP = {
    "name": "a loop", "warps": 1, "programs": 4, "launched": 8, "tokens": 64, "page": 64, "bytes_of_token": 100.0, "alone": 5000,
    "busy": {"issue": 1000, "integer": 1200},
}  # fmt: skip
SMALL = Device("small", 90, 10, 1e9, 1e12, "made up")
CASE = Case("a case", "kivi", {"a loop": 1.0}, rows=2, kv_heads=5, query_rows=4)


# --- the page ---


def test_the_page_says_what_the_run_found():
    assert PAGE.read_text(encoding="utf-8") == page(RUN, runs())


def test_every_case_and_loop_is_in_the_run():
    assert [(step["case"], step["device"]) for step in RUN["steps"]] == [
        (case.name, device) for case in CASES for device in DEVICES
    ]
    wanted = [
        (name, capability) for name in dict.fromkeys(n for c in CASES for n in c.loops) for capability in CAPABILITIES
    ]
    assert [(loop["name"], loop["capability"]) for loop in RUN["loops"]] == wanted
    rows = {target.name for target in TARGETS}
    assert {case.copy_row for case in CASES if case.copy_row} < rows
    assert sum(case.name in rows for case in CASES) == 5


def test_the_run_follows_from_its_loops_and_launches():
    """If a formula changes, the run has to be written again."""
    loops = {(loop["name"], loop["capability"]): loop for loop in (*RUN["loops"], *RUN["lists"])}
    steps = [
        predicted(case, loops, RUN["launches"][case.method], device) for case in CASES for device in DEVICES.values()
    ]
    assert without_last_bits(steps) == without_last_bits(RUN["steps"])


def test_loops_hold_to_their_limits():
    for loop in RUN["loops"]:
        one = SPECIALISATIONS[loop["name"]]
        assert loop["spilled"] <= one.spilled or loop["capability"] == NEWEST
        assert loop["programs"] >= one.programs
        if loop["capability"] != NEWEST or one.warps == 1:
            assert loop["instructions_of_code"] <= one.most
            assert loop["barriers"] <= one.barriers and loop["waits"] <= one.waits


def test_what_was_measured_stands_beside():
    def run(when: str, device: str, median: float | None) -> dict:
        found = None if median is None else {"median": median}
        return {
            "when": when,
            "device": {"name": device},
            "targets": [{"name": "a row", "unit": "x", "measured": found}],
        }

    of = [run("1", "NVIDIA H200", 3.5), run("2", "NVIDIA H200", 3.75), run("3", "NVIDIA H200", None), run("4", "L4", 9)]
    assert measured("a row", "H200", of) == "3.75x"
    assert (
        measured("a row", "H100", of) == measured("another", "H200", of) == measured("a row", "H200", []) == "not yet"
    )


@pytest.mark.slow
def test_the_command_compiles_and_prints_the_page():
    """Figures depend on the installed Triton, so only the beginning of each line is compared. Without `--write` nothing is
    written."""
    before = RESULT.read_bytes(), PAGE.read_bytes()
    command = [sys.executable, "-m", "benchmarks.gpu.roofline"]
    interpreting_nothing = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=interpreting_nothing, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said, page_of_record = done.stdout.rstrip().splitlines(), PAGE.read_text(encoding="utf-8").splitlines()
    assert [line[:20] for line in said] == [line[:20] for line in page_of_record]
    assert (RESULT.read_bytes(), PAGE.read_bytes()) == before


# --- the formulas ---


def test_a_launch_by_hand():
    """640 tokens are ten turns. 8 programs on each of 10 multiprocessors are 8 per head, of two turns each, so only five have
    tokens: 50 programs, five per multiprocessor, of which four run at once."""
    found = attended(LOOP, 640, CASE, SMALL)
    assert (found["turns"], found["splits"], found["programs"]) == (2, 5, 5)
    assert found["packed"] == 10 * 640 * 100
    parts = 2 * 4 * 10 * 5 * 4 * 130
    assert found["seconds"]["bytes"] == pytest.approx((640_000 + parts) / (COPY * 1e12))
    assert found["seconds"]["integer"] == pytest.approx(2 * 2 * 1200 / 1e9), "two warps on the fullest scheduler"
    assert found["seconds"]["waits"] == pytest.approx(2 * 2 * 5000 / 1e9), "two rounds"
    assert found["bound"] == "waits"


def test_a_page_that_is_no_whole_turn_is_read_in_whole_turns():
    assert attended({**LOOP, "page": 80}, 800, CASE, SMALL)["turns"] == 3  # 20 turns instead of 12.5


def test_a_step_by_hand():
    found = predicted(CASE, {("a loop", 90): LOOP}, 10, SMALL)
    attention = found["parts"][0]["seconds"]["waits"]
    exact = 2 * 5 * 32768 * 512
    assert found["attention"] == attention and found["step"] == [attention + 10 * node for node in NODE]
    assert found["bits_per_value"] == pytest.approx(100 * 8 / 256)
    assert found["speedup_of_attention"] == pytest.approx(exact / (COPY * 1e12) / attention)
    low, high = found["speedup"]
    assert low <= high < found["speedup_of_attention"]
    assert found["share_of_copy"][0] == pytest.approx(10 * 32768 * 100 / (COPY * 1e12) / found["step"][1])


def test_lists_by_hand():
    """Ten heads on ten multiprocessors: 32 programs per head for scores, and for mixtures one per part of attention."""
    part = {"instructions": 10, "busy": {"issue": 100, "memory": 400}, "alone": 1000}
    loop = {"programs": 16, "warps": 1, "around": part, "inside": {**part, "busy": {"issue": 50}, "alone": 100}}
    found = listed({**loop, "name": SCORES}, 0.02, 5, SMALL, 10, 4)
    assert (found["splits"], found["turns"], found["programs"]) == (32, 32, 32)
    inner, tokens = turns_of_tile(0.02), 10 * 32768
    assert found["seconds"]["memory"] == pytest.approx(32 * 8 * 400 / 1e9)
    assert found["seconds"]["waits"] == pytest.approx(32 * 2 * (1000 + inner * 100) / 1e9)
    assert found["packed"] == pytest.approx(tokens * (2.56 * 3 + 2))
    assert found["seconds"]["bytes"] == pytest.approx((found["packed"] + 16 * tokens) / (COPY * 1e12))
    found = listed({**loop, "name": MIXTURES, "warps": 2}, 0.02, 8, SMALL, 10, 4)
    assert (found["splits"], found["turns"], found["programs"]) == (8, 4, 8)
    assert found["seconds"]["issue"] == pytest.approx(4 * 4 * (100 + (10.24 + 0.5) * 50) / 1e9), (
        "two warps of each program"
    )


@pytest.mark.full
def test_turns_of_a_tile_and_a_stretch():
    """The expected numbers of turns against the mean of random draws."""
    of_keys, of_values = AT_ONCE[SCORES], 32 * AT_ONCE[MIXTURES]
    draw = torch.Generator().manual_seed(1)
    for share in (0.001, 0.02, 0.1):
        counts = torch.rand(4000, 32, 128, generator=draw).lt(share).sum(-1).amax(-1)
        assert turns_of_tile(share) == pytest.approx(float((counts / of_keys).ceil().mean()), rel=0.02)
        counts = torch.rand(200, 512 * 128, generator=draw).lt(share).sum(-1)
        assert turns_of_stretch(share) == pytest.approx(float((counts / of_values).ceil().mean()), rel=0.1)
    assert turns_of_tile(0.0) == 0 and turns_of_tile(1.0) == 128 / of_keys


def test_clocks_of_a_turn_by_pipe():
    lines = [
        "LOP3.LUT R1, R2, 0xf, R3, 0xea, !PT", "IMAD.WIDE R2, R4, 0x2, R6", "FFMA R1, R2, R3, R4", "HFMA2 R1, R2, R3, R4",
        "MUFU.EX2 R1, R2", "LDSM.16.MT88.4 R4, [R8+0x400]", "LDS.64 R4, [R8]", "@P0 SHFL.BFLY PT, R1, R2, 0x10, 0x1f",
        "HMMA.16816.F32 R4, R8, R12, R4", "UIADD3 UR4, UR4, 0x1, URZ",
    ]  # fmt: skip
    common = {"issue": 10, "integer": 2, "half": 1, "special": 8, "memory": 16 + 8 + 4}
    assert busy(lines, 80) == common | {"float": 4, "matrix": 8}
    assert busy(lines, 90) == common | {"float": 3, "matrix": 4}
    assert busy(["HGMMA.64x8x16.F32 R24, R4, gdesc[UR8], R24"], 90)["matrix"] == 4


@pytest.mark.parametrize("bits", [4, 2])
def test_bytes_of_a_token_are_those_of_a_cache(bits):
    given = [torch.randn(1, 2, 256, 128) for _ in range(2)]
    one = SPECIALISATIONS[f"{bits} bits, per channel of 128, ahead"]
    assert packed_bytes(tier(bits, 128, *given)) == 2 * 256 * bytes_of_token(one)


def test_bytes_of_a_token_with_sizes_and_coefficients():
    assert bytes_of_token(SPECIALISATIONS["6 4 3 2 1 bits, turned, mixed"]) == 2 * (2 * 16 + 0.5)
    assert bytes_of_token(SPECIALISATIONS["2 bits, groups of 32, rank 4"]) == 2 * (2 * 16 + 2 * 4 + 4 * 4)


# --- the loops ---


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "options", "loops"),
    [
        ("zipcache", TIERS, list(CASES[0].loops)),
        ("kivi", {"bits": 4, **UNIFORM}, list(CASES[2].loops)),
        ("kivi", {"bits": 2, **UNIFORM}, list(CASES[3].loops)),
        ("gear", {}, list(CASES[4].loops)),
        ("rtn", {"bits": 4}, list(CASES[5].loops)),
    ],
)
def test_a_step_launches_the_loops_that_are_counted(method, options, loops, monkeypatch):
    """An interpreted step of the measured layer launches the kernels with the constants, warps and stages of the counted loops. (No
    launch begins early in the interpreter.)"""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setenv("CALIB_KERNELS", "triton")
    launched, run = [], InterpretedFunction.run

    def noted(kernel, *arguments, **given):
        if kernel.__name__ == "attend":
            launched.append(given)
        return run(kernel, *arguments, **given)

    heads, cpu = Heads(1, 8, 2, 128), torch.device("cpu")
    keys, values = (tokens(1, 2, 420, 128, seed, cpu, torch.bfloat16) for seed in (1, 2))
    layer = filled(bare_layers(method, heads, 1, **options)[0], heads, keys, values, 3)
    monkeypatch.setattr(InterpretedFunction, "run", noted)
    new = [tokens(1, 2, 1, 128, seed, cpu, torch.bfloat16) for seed in (4, 5)]
    forward(layer, queries(keys, 8, 1, 6), *new)
    assert len(launched) == len(loops)
    for given, name in zip(launched, loops, strict=True):
        one = replace(SPECIALISATIONS[name], kernel=None)
        assert (given["num_warps"], given["num_stages"]) == (one.warps, one.stages)
        constants = {key: value for key, value in one.constants.items() if key in given}
        assert {key: given[key] for key in constants} == constants | {"INTERPRET": True, "EARLY": False}, name
        assert not {key for key in given if key.isupper()} - set(one.constants) - {"INTERPRET"}
