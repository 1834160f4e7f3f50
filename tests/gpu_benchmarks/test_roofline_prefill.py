"""Roofline predictions of prefills: formulas give numbers worked out by hand, turns are the tiles that probes see, and the launches
that are counted without running a kernel are those of a real prefill."""

import json
from math import prod

import pytest
import torch
from last_bits import without_last_bits

from benchmarks.gpu.devices import COPY, DEVICES, NODE, Device
from benchmarks.gpu.layers import Heads
from benchmarks.gpu.prefill_bytes import bytes_of, moved, products_of
from benchmarks.gpu.prefill_cost import METHODS, TARGET_ROWS, baseline, group_seconds, predicted
from benchmarks.gpu.prefill_kernels import (
    COLLECT,
    COUNT,
    DIGIT,
    EDGE,
    HEAD,
    INSIDE,
    ONCE,
    TURN,
    bytes_of_launch,
    elements_of,
    parts_of,
    turns_of,
)
from benchmarks.gpu.prefill_launches import OPTIONS, Noted, Noting, prefill_of
from benchmarks.gpu.roofline import RESULT
from benchmarks.gpu.sizes import REAL, Sizes
from benchmarks.gpu.targets import TARGETS
from calib.kernels.upload import upload
from calib.runtime.tiered import row_transform

pytestmark = pytest.mark.arithmetic

RUN = json.loads(RESULT.read_text(encoding="utf-8"))["prefill"]
LAUNCHED = {int(capability): own for capability, own in RUN["launched"].items()}
SMALL = Device("small", 90, 10, 1e9, 1e12, "made up")
HEADS = Heads(1, 4, 2, 128)


# --- the run of record ---


def test_the_run_follows_from_its_kernels_and_launches():
    steps = [
        predicted(method, LAUNCHED[device.capability][method], RUN["kernels"], device)
        for method in METHODS
        for device in DEVICES.values()
    ]
    assert without_last_bits(steps) == without_last_bits(RUN["steps"])
    assert RUN["baseline"] == {own.name: baseline(own) for own in DEVICES.values()}


@pytest.mark.parametrize("step", RUN["steps"], ids=lambda step: f"{step['method']} on {step['device']}")
def test_bytes_and_instructions_are_a_small_share_of_a_prefill(step):
    """At most 4 %, except for `mikv`, whose probes are all rows of the prompt."""
    assert (step["share_of_work"] <= 0.04) is (step["method"] != "mikv")


def test_targets_have_their_rows():
    assert set(TARGET_ROWS.values()) == {target.name for target in TARGETS if target.name.startswith("prefill")}
    assert set(TARGET_ROWS) < set(METHODS)


@pytest.mark.parametrize("launched", LAUNCHED.values(), ids=LAUNCHED)
def test_every_value_of_a_prompt_is_encoded(launched):
    """All tokens are encoded (with KIVI also those of the exact window, in advance), except MiKV's important ones."""
    values = 2 * REAL.kv_heads * REAL.prompt * REAL.head_dim
    encoded = {
        method: sum(group["elements"] for group in launched[method]["ours"] if "bits" in group["kernel"])
        for method in METHODS
    }
    important = -(-REAL.prompt * 2 // 10)
    assert encoded["rtn"] == encoded["zipcache"] == encoded["kivi"] == values
    assert encoded["mikv"] == values - 2 * REAL.kv_heads * important * REAL.head_dim


@pytest.mark.parametrize("launched", LAUNCHED.values(), ids=LAUNCHED)
def test_spans_of_mikv_are_those_of_attention(launched):
    """Every row is a probe: the tiles cover all pairs of a row and a visible token, and at most 2 % more."""
    pairs = REAL.heads * REAL.prompt * (REAL.prompt + 1) // 2
    (scored,) = (group["elements"] for group in launched["mikv"]["ours"] if group["kernel"].startswith("column_sums"))
    assert pairs < scored < 1.02 * pairs


# --- the formulas ---


def test_a_prefill_at_its_best_by_hand():
    size = Sizes(heads=4, kv_heads=2, head_dim=8, prompt=1000, hidden=32, intermediate=64)
    found = baseline(SMALL, size)
    rate = 512 * 4 * 10 * 1e9  # products per second; with widths this small bytes take longer
    copied = COPY * 1e12
    assert found["projections"] == pytest.approx(2 * (32 * 64 + 32 * 32 + 1000 * (32 + 64 + 32 + 32)) / copied)
    assert found["MLP"] == pytest.approx(2 * (32 * 128 + 64 * 32 + 1000 * (32 + 128 + 64 + 32)) / copied)
    assert found["attention"] == pytest.approx(2 * 4 * 8 * 1000 * 1001 / 2 / rate)
    assert baseline(DEVICES["A100"])["MLP"] == pytest.approx(32768 * 3 * 4096 * 14336 / 156e12, rel=0.01)


def test_launches_of_a_kernel_by_hand():
    """Two launches, of 30 and 50 programs of two warps. The device runs 20 programs at once, so they take two and three rounds."""
    group = {"turns": {"once": 80, "inside": 400}, "grids": [30, 50], "bytes": 9_000_000}
    parts = {
        "once": {"busy": {"issue": 100, "special": 8}, "alone": 600},
        "inside": {"busy": {"issue": 50, "special": 80}, "alone": 100},
    }
    found = group_seconds(group, {"parts": parts, "warps": 2, "programs": 2}, SMALL)
    assert found["bytes"] == pytest.approx(9e6 / (COPY * 1e12))
    assert found["special"] == pytest.approx(2 * (80 * 8 + 400 * 80) / (40 * 1e9))
    assert "issue" not in found, "the pipe that has most to do is named alone"
    assert found["waits"] == pytest.approx((80 * 600 + 400 * 100) / 80 * 5 / 1e9)
    few = group_seconds(group | {"grids": [4]}, {"parts": parts, "warps": 2, "programs": 2}, SMALL)
    assert few["special"] == pytest.approx(found["special"] * 10 / 4), "6 of 10 multiprocessors have nothing to do"


def test_a_method_by_hand():
    """A kernel, half of whose time a side stream could hide, and three operations of torch with their launches."""
    kernel = {"parts": {"once": {"busy": {"issue": 90}, "alone": 1, "instructions": 90}}, "warps": 1, "programs": 8}
    group = {
        "kernel": "encode, 4 bits",
        "turns": {"once": 4000},
        "grids": [4000],
        "bytes": 16_200_000,
        "elements": 64000,
    }
    launched = {"ours": [group], "torch": {"cat": {"launches": 3, "bytes": 900_000, "products": 0}}, "waits": 2}
    found = predicted("kivi", launched, {"encode, 4 bits for sm_90": kernel}, SMALL)
    whole = sum(baseline(SMALL).values())
    assert found["prefill"] == whole and found["launches"] == 4 and found["waits"] == 2 and found["probes"] == 0
    assert found["encoding"] == pytest.approx(18e-6) and found["torch"] == pytest.approx(1e-6)
    assert found["share"] == pytest.approx([(19e-6 + 4 * node) / whole for node in NODE])
    assert found["share_beside"] == pytest.approx(9e-6 / whole)
    assert found["parts"][0]["instructions"] == 180 and found["parts"][0]["bound"] == "bytes"


# --- what a program runs ---


def score(kernel: str, probes: list[int], tokens: int) -> dict:
    """A launch of one of the saliency kernels, for two rows with two KV heads and six query heads."""
    owners = -(-(len(probes) if kernel == "row_normalisers" else tokens) // 8)
    values = {"OWNED": 8, "STREAMED": 4, "D": 16, "tokens": tokens, "group": 3, "nearest": 0, "farthest": tokens}
    return {
        "kernel": kernel,
        "grid": [owners * (12 if kernel == "row_normalisers" else 4)],
        "probes": probes,
        "values": values,
    }


@pytest.mark.parametrize("tokens", [64, 61])
def test_turns_are_those_of_the_tiles_that_probes_see(tokens):
    draw = torch.Generator().manual_seed(tokens)
    probes = torch.randperm(tokens - 9, generator=draw)[:13].sort().values.tolist() + list(range(tokens - 9, tokens))
    edge = inside = 0
    for start in range(0, len(probes), 8):
        own = probes[start : start + 8]
        for at in range(0, tokens, 4):
            seen = own[-1] >= at
            whole = own[0] >= at + 3
            inside, edge = inside + whole, edge + (seen and not whole)
    found = turns_of(score("row_normalisers", probes, tokens))
    assert found == {ONCE: 12 * -(-len(probes) // 8), EDGE: 12 * edge, INSIDE: 12 * inside}

    edge = inside = 0
    for start in range(0, tokens, 8):
        for at in range(0, len(probes), 4):
            own = probes[at : at + 4]
            seen, whole = own[-1] >= start, own[0] >= start + 8
            inside, edge = inside + whole, edge + (seen and not whole)
    launch = score("column_sums", probes, tokens)
    programs = 4 * -(-tokens // 8)
    assert turns_of(launch) == {ONCE: programs, HEAD: 3 * programs, EDGE: 12 * edge, INSIDE: 12 * inside}
    assert elements_of(launch) == 12 * (edge + inside) * 32


def test_turns_of_a_selection():
    """Radix selection: each of four digits is counted in every tile, and positions are collected once."""
    launch = {"kernel": "largest", "grid": [6], "probes": None, "values": {"tokens": 1000, "TILE": 512, "k": 600}}
    assert turns_of(launch) == {ONCE: 6, DIGIT: 24, COUNT: 48, COLLECT: 12}
    assert elements_of(launch) == 6000
    assert bytes_of_launch(launch | {"tensors": {"scores": 24000, "chosen": 28800, "others": 19200}}) == 72000


def test_turns_of_what_is_measured():
    """Channel statistics of a tier: its tokens are read once, by their order, and the extremes of the parts are merged."""
    given = {"total": 900, "turns": 8, "D": 96, "TOKENS": 32, "D_UP": 128}
    launch = {"kernel": "channel_extremes", "grid": [4, 2, 3], "probes": None, "values": given, "types": {"x": "*bf16"}}
    assert turns_of(launch) == {ONCE: 24, TURN: 192} and elements_of(launch) == 900 * 6 * 96
    tensors = {"x": 5000 * 6 * 96 * 2, "ORDER": 900 * 6 * 8, "EXTREMES": 24 * 2 * 96 * 4}
    assert bytes_of_launch(launch | {"tensors": tensors}) == 900 * 6 * (96 * 2 + 8) + 24 * 2 * 96 * 4
    numbers = {"parts": 4, "asked": 0, "D": 96}
    launch = {"kernel": "channel_numbers", "grid": [2, 3], "probes": None, "values": numbers}
    assert turns_of(launch) == {ONCE: 6} and elements_of(launch) == 4 * 6 * 2 * 96
    assert bytes_of_launch(launch | {"tensors": {"EXTREMES": 18432, "CENTER": 1152, "NUMBERS": 1152}}) == 20736


def test_parts_of_a_listing():
    def line(text: str) -> str:
        return f"        /*0010*/                   {text} ;"

    once, inside, edge = "MOV R1, R2", "HMMA.16816.F32 R4, R8, R12, R4", "ISETP.GE.AND P0, PT, R1, R2, PT"
    scored = [
        line(once), ".L_x_1:", line("S2R R0, SR_TID.X"), ".L_x_2:", line(edge), line(edge), line("@P0 BRA `(.L_x_2)"),
        ".L_x_3:", line(inside), line("@P0 BRA `(.L_x_3)"), line("@P1 BRA `(.L_x_1)"), line("EXIT"),
    ]  # fmt: skip
    found = parts_of("\n".join(scored), "column_sums")
    assert {name: len(lines) for name, lines in found.items()} == {INSIDE: 2, EDGE: 3, HEAD: 2, ONCE: 2}
    assert inside in found[INSIDE] and edge in found[EDGE] and once in found[ONCE]
    selected = [
        line(once), ".L_x_1:", line(once), ".L_x_2:", line(inside), line("@P0 BRA `(.L_x_2)"), line("@P1 BRA `(.L_x_1)"),
        ".L_x_3:", line(edge), line(edge), line("@P0 BRA `(.L_x_3)"), line("EXIT"),
    ]  # fmt: skip
    found = parts_of("\n".join(selected), "largest")
    assert {name: len(lines) for name, lines in found.items()} == {COUNT: 2, DIGIT: 2, COLLECT: 3, ONCE: 2}
    assert inside in found[COUNT] and edge in found[COLLECT]
    assert parts_of("\n".join([line(once), line("EXIT")]), "by_planes") == {ONCE: [once, "EXIT"], TURN: []}
    looped = [line(once), *scored[7:10], line("EXIT")]
    found = parts_of("\n".join(looped), "project")
    assert {name: len(lines) for name, lines in found.items()} == {ONCE: 2, TURN: 2} and inside in found[TURN]
    assert parts_of("\n".join(looped), "channel_extremes") == found
    for listing, kernel in ((scored, "by_planes"), (looped, "by_planes"), (looped, "column_sums"), (scored, "project")):
        with pytest.raises(ValueError, match="loops"):
            parts_of("\n".join(listing), kernel)


# --- what is launched ---


def test_bytes_of_operations():
    x, index = torch.zeros(4, 100, 8, dtype=torch.float16), torch.zeros(4, 10, 8, dtype=torch.int64)
    assert bytes_of(x) == 6400 and bytes_of(x[:1].expand(4, 100, 8)) == 1600
    assert moved("abs", [x], [x]) == 12800
    assert moved("gather", [x, index], [x[:, :10]]) == 2 * 640 + 2560
    assert moved("index_put_", [x, index[0, :, 0], x[0, :10]], [x]) == 80 + 2 * 160
    assert moved("zeros", [], [x]) == 6400
    assert moved("copy_", [x, x.float()], [x]) == 12800 + 6400
    assert products_of("bmm", [torch.zeros(2, 3, 5), torch.zeros(2, 5, 7)]) == 2 * 3 * 5 * 7
    assert products_of("mul", [x, x]) == 0


@pytest.mark.full
@pytest.mark.parametrize("method", ["kivi", "zipcache", "mikv", "klt"])
def test_what_is_counted_is_what_a_prefill_launches(method, monkeypatch):
    """A prefill whose kernels are only noted has the same launches as one that runs them; the kernels are those of the run's long
    prompt."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    # The first prefill copies tables to the device that later ones reuse.
    _, noted, run = (prefill_of(method, OPTIONS.get(method, {}), HEADS, 300, runs) for runs in (False, False, True))
    assert noted.ours == run.ours and noted.torch == run.torch and noted.waits == run.waits
    counted = LAUNCHED[90][method]
    assert {launch.kernel for launch in noted.ours} == {group["kernel"].split(",")[0] for group in counted["ours"]}
    assert set(noted.torch) <= set(counted["torch"]) and noted.waits == counted["waits"]
    assert all(prod(launch.grid) for launch in noted.ours)


def test_what_the_host_works_out_is_no_launch():
    """Operations on tensors of the host are not counted; a copy to the device is, and so are operations on the copy."""
    noted = Noted()
    with Noting(noted):
        device = torch.ones(4, device="cpu")
        host = torch.arange(4)
        assert (host * 2 + torch.tensor([1, 2, 3, 4]))[1:].sum().item() == 21
        assert (noted.torch.keys(), noted.waits) == ({"ones"}, 0)
        brought = row_transform.upload(host, torch.int64, device.device)
        assert noted.torch["clone"].launches == 1
        assert (device + brought).shape == (4,) and not len(device[:0] + 1), "an addition of nothing launches nothing"
        assert noted.torch["add"].launches == 1
        assert float(host.max()) == 3 and noted.waits == 0
        assert float(brought.max()) == 3 and noted.waits == 1
    assert row_transform.upload is upload


def test_bytes_of_a_launch_are_those_of_the_tokens_that_it_encodes(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    launches = [vars(launch) for launch in prefill_of("rtn", {"bits": 4}, HEADS, 256).ours]
    tokens, of_codes, of_parameters = 2 * 256 * 128, 2 * 256 * 128 // 2, 2 * 256 * 4  # of each stream
    encoded, copied = [launches[at::2] for at in range(2)]
    assert [elements_of(launch) for launch in encoded] == [tokens, tokens]
    assert [bytes_of_launch(launch) for launch in encoded] == [2 * tokens + of_codes + of_parameters] * 2
    assert [elements_of(launch) for launch in copied] == [(of_codes + of_parameters) // 2] * 2  # numbers of 16 bits
    assert [bytes_of_launch(launch) for launch in copied] == [2 * (of_codes + of_parameters)] * 2
    back, keys, values = [
        vars(launch) for launch in prefill_of("klt", OPTIONS["klt"], HEADS, 256).ours if launch.kernel != "put"
    ]
    assert elements_of(back) == 2 * (256 - 4 - 64) * 128 and bytes_of_launch(back) == elements_of(back) * (
        2 + 4 + 4 / 2
    )
    for launch, width in ((keys, 4), (values, 2)):  # unrotated keys are float32
        given, coded = launch["values"], 256 - 4 - 64
        assert (
            elements_of(launch) == 2 * coded * 128
            and turns_of(launch)[TURN] == turns_of(launch)[ONCE] * 128 // given["BD"]
        )
        table = 2 * (2 * 128 * 4 + (2 * 128 + 4) * given["FIELDS"] * given["W"]) + 3 * 4
        assert bytes_of_launch(launch) == width * 2 * coded * 128 + 2 * coded * given["row_words"] + table


def test_bytes_of_probes_are_those_of_the_rows_that_are_chosen(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    (launch,) = [vars(one) for one in prefill_of("zipcache", {}, HEADS, 300).ours if one.kernel == "rows_of_probes"]
    probes, owned = launch["values"]["probes"], launch["values"]["OWNED"]
    assert 0 < probes == len(launch["probes"]) <= owned
    assert elements_of(launch) == HEADS.heads * probes * (128 + 1)
    read = 2 * HEADS.heads * (probes * 128 * 2 + owned * 4)  # and written
    assert bytes_of_launch(launch) == read + launch["tensors"]["positions"]
