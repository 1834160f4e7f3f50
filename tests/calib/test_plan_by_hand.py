"""What a plan says of Llama-2-7B against numbers written down by hand; the arithmetic of its extrapolation; counting bytes."""

import json
from pathlib import Path

import pytest
import torch
from plan_page import LLAMA2, example, machines_own, untimed
from toy_language_model import CONFIGS
from transformers import Phi3Config

from calib.cli import main
from calib.fit.calibration import Calibration
from calib.plan import plan as planning
from calib.plan.capture_cost import Sizes
from calib.plan.duration import flops, layer_parameters
from calib.plan.meta_model import MetaModel, one_layer, read_meta_model, without_weights
from calib.plan.meta_tensors import META, MetaTensors
from calib.plan.peaks import transients
from calib.plan.probe import Pace
from calib.statistics.components import FACTORS, GAUSSIAN, add

MIB = 2**20
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/plan.md"

# Seconds that make a sum easy: a forward's are its floating-point operations in 1e12, a statistic's 1 for 2048 tokens.
STATISTICS = (
    *("channel_range", "channel_scale", "balancer", "query_energy", "outlier_thresholds", "vectors"),
    *("clip", "residual_basis", "heldout", "heldout_vectors"),
    *("second_moments", "sensitivity", "components"),
)
PACE = Pace(
    tokens=1024,
    length=1024,
    observe=dict.fromkeys(STATISTICS, 0.5),
    finish=dict.fromkeys(STATISTICS, 0.25),
    step={"keys": 1.0, "values": 2.0},
    validation={"keys": 0.001, "values": 0.0},
    start={"keys": 0.0, "values": 0.0001},
    pair=0.125,
    byte=1e-9,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama2")
    (folder / "config.json").write_text(json.dumps(LLAMA2))
    return folder


@pytest.fixture(scope="module")
def plan(llama, tmp_path_factory):
    """The JSON of `calib fit --config llama2.yaml --plan`, with PACE instead of the machine's own."""
    given = tmp_path_factory.mktemp("plan") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        PACE.forward = flops(read_meta_model(str(llama), "float16"), 1024, 1024) / 1e12
        patch.setattr(planning, "measured_pace", lambda *_: PACE)
        asked = [f"--model.path={llama}", "--trainer.accelerator=cpu", "--plan", f"--plan_json={given}"]
        assert main(["fit", "--config", "llama2.yaml", *asked]) == 0
    return json.loads(given.read_text())


@pytest.mark.full
def test_the_weights(plan):
    attention, mlp, norms = 4 * 4096**2, 3 * 4096 * 11008, 2 * 4096
    assert plan["model"]["parameters"] == 32 * (attention + mlp + norms) + 2 * 32000 * 4096 + 4096
    assert plan["model"]["weights_bytes"] / 1e9 == pytest.approx(13.48, abs=0.01)


@pytest.mark.full
def test_caches(plan):
    found = plan["cache"]["methods"]
    assert plan["cache"]["exact_16_bit_bytes"] == found["full"]["device_bytes"] == 2 * 2**30
    assert found["offload"]["host_bytes"] == 2 * 2**30
    # KIVI: 4096 keys and 3968 values at 2 bits with 2 x 16 bits for 32 of them; 128 exact values. A table of 4 pages a row.
    pairs = 32 * 32 * 128  # layers, KV heads, channels
    kivi = pairs * (2 * 4096 * 3 / 8 + 128 * 2)
    assert found["kivi"]["device_bytes"] == pytest.approx(kivi, rel=0.01)
    assert found["rtn"]["device_bytes"] == pytest.approx(pairs * 2 * 4096 * 4.25 / 8, rel=0.01)
    assert found["rtn"]["bits_per_value"] == pytest.approx(4.25, rel=0.01)


@pytest.mark.full
def test_statistics_and_the_artifact(plan):
    sizes = {name: one["bytes"] for name, one in plan["statistics"]["each"].items()}
    channels, bits = 32 * 32 * 128, 4
    assert sizes["channel_range"] == 4 * 4 * channels
    assert sizes["residual_basis"] - 2 * 8 == 2 * 2 * 8 * channels * 128  # two forms, two widths, float64
    assert sizes["vectors"] == 32 * 32768 * (2 * 128 * 2 + 8)
    moment = (
        8 * channels * 128
    )  # float64, of every head of every layer; of the three streams of klt, of queries, of values by keys
    assert sizes["second_moments"] == 6 * moment + 3 * 8 * channels + 8 * 32
    assert sizes["sensitivity"] == 4 * moment + 8 * 32
    assert sizes["components"] == 3 * 8 * channels * (2 + 8 * 16 + 8 * 6) + 8 * 32
    assert sizes["outlier_thresholds"] == 32 * 2048 * (2 * 32 * 128 * 4 + 8)
    ranges, thresholds = 7 * 4 * channels, 4 * 4 * 3 * (channels + 32 * 32 + 32) + 3 * 4
    clip, bases = 7 * 32 * 32 * bits * 4, 4 * channels * 8 * 4
    dictionaries = 32 * 8192 * (128 + 64) * 2 + 2 * (32 * 8 + 32 * 32 * 4)
    transforms = (
        4 * channels * (3 * (1 + 128 + 8 + 9) + 2 * (8 + 9) + 128 + 8 + 9 + 128)
    )  # three streams, two sized, one predicted
    written = ranges + thresholds + clip + bases + dictionaries + transforms
    assert written < plan["artifact"]["bytes"] < 1.002 * written  # the header and its figures


@pytest.mark.full
def test_passes_and_disk(plan):
    assert [(one["batches"], one["checkpoints"]) for one in plan["passes"]] == [(128, 17), (16, 3), (16, 3), (16, 3)]
    assert plan["corpus"]["tokens"] == 144 * 2048
    assert plan["disk"]["statistics_checkpoints"] == 4 * plan["statistics"]["bytes"]
    assert plan["dictionaries"]["streams"]["values"] == {
        "groups": 32, "atoms": 8192, "channels": 64, "pairs": 4, "vectors": 2 * 32 * 32768, "steps": 10 * 32 * 128,
    }  # fmt: skip


@pytest.mark.full
def test_seconds_are_the_pieces_times_how_many_there_are(plan):
    stages = plan["seconds"]["stages"]
    weights = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    teraflops = 128 * 2048 * (2 * weights + 2 * 32 * 128 * 2048) / 1e12
    # Seven statistics of 128 sequences, each of twice the tokens of the piece; their ends.
    assert stages["statistics"] == pytest.approx(32 * (teraflops + 7 * 128 * 2 * 0.5 + 7 * 0.25), rel=1e-4)
    assert stages["sensitivity"] == pytest.approx(32 * (teraflops / 8 + 16 * 2 * 0.5 + 0.25), rel=1e-4)
    assert stages["clip"] == pytest.approx(32 * (teraflops / 8 + 3 * 16 * 2 * 0.5 + 3 * 0.25), rel=1e-4)
    # Six budgets and the exact cache, of 16 sequences; 16 more, and 32 tokens of each through half of 32 layers, and the last one,
    # for keys and values of 4 of a layer's 32 heads.
    losses = 7 * 16 + 16 * (1 + 2 * 4 * (32 + 1) / 2 * 32 / 2048)
    assert stages["losses"] == pytest.approx(losses * 32 * teraflops / 128, rel=1e-4)
    assert stages["layer groups"] == 2 * 32 * 31 / 2 * 0.125
    keys = 10 * 64 * 1.0 + (11 * 4096 + 10 * 4096) * 0.001
    values = 10 * 128 * 2.0 + 2 * 32768 * 0.0001
    assert stages["dictionaries"] == pytest.approx(32 * (keys + values))
    assert stages["checkpoints"] == pytest.approx(26 * plan["statistics"]["bytes"] * 1e-9)
    assert plan["seconds"]["total"] == pytest.approx(sum(stages.values()))


def test_processes_share_the_batches(llama):
    meta_model = read_meta_model(str(llama), "float16")
    assert layer_parameters(meta_model) == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096 + 4096 // 32
    stages = planning.passes(Calibration("x", clip_sequences=3), Sizes(64, 10, 4, batch=2, processes=2))
    assert [one.batches for one in stages] == [3, 3, 1, 1]
    less = planning.passes(Calibration("x", sensitivity_sequences=0), Sizes(64, 10, 4, batch=2))
    assert [one.stage.name for one in less] == ["statistics", "clip", "evaluate"]
    none = planning.passes(Calibration("x", klt=False), Sizes(64, 10, 4, batch=2))
    assert not {"second_moments", "sensitivity", "components"} & {name for one in none for name in one.statistics}
    assert not any("rotations" in one.statistics for one in stages)
    asked = planning.passes(Calibration("x", rotations=True), Sizes(64, 10, 4, batch=2))
    assert [one.stage.name for one in asked if "rotations" in one.statistics] == ["statistics"]


@pytest.mark.full
def test_the_memory_of_a_stage_holds_weights_statistics_and_what_is_made_of_a_layer(plan):
    stages = {one["stage"]: one["host"] for one in plan["memory"]["stages"]}
    held = plan["model"]["weights_bytes"] + 3 * plan["statistics"]["bytes"]  # with two copies of a checkpoint
    # The MLP's two inner activations of a sequence in float16, at least; a few hundred MB at most.
    assert held + 2 * 2048 * 11008 * 2 < stages["statistics"] < held + 1000 * MIB
    vectors = 3 * 32 * (32768 + 4096) * 128 * 4
    assert stages["dictionaries"] > plan["model"]["weights_bytes"] + plan["statistics"]["bytes"] + vectors


@pytest.mark.full
@pytest.mark.parametrize("kind", [*CONFIGS, "phi3"])
def test_every_architecture_is_walked_without_numbers(kind):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = CONFIGS[kind]() if kind in CONFIGS else Phi3Config(**sizes, vocab_size=99, pad_token_id=0)
    meta_model = MetaModel(without_weights(config, torch.float32), one_layer(config))
    found = transients(Calibration("x"), meta_model, Sizes(64, 4, 2, batch=2))
    keys = 2 * 64 * meta_model.shape.kv_heads * meta_model.shape.head_dim * 4
    assert all(size > 3 * keys for size in found.values())  # queries, keys and values are there, and more
    twice = transients(Calibration("x"), meta_model, Sizes(64, 4, 2, batch=4))
    assert found["sensitivity"] == twice["sensitivity"] > found["clip"]  # a sequence at a time, all layers at once
    assert all(found[stage] < twice[stage] <= 2 * found[stage] for stage in found if stage != "sensitivity")


def test_one_bit_width_of_components_takes_as_much_memory_as_all():
    """So a plan counts the memory of one bit width only (`transients`)."""
    found = []
    with torch.no_grad(), MetaTensors() as memory, META:
        y, deviation = torch.empty(2, 500, 16), torch.empty(2, 16)
        energy, error = torch.empty(2, 16), torch.empty(2, 16, len(GAUSSIAN), len(FACTORS))
        for widths in (GAUSSIAN[:1], GAUSSIAN):
            before = memory.most = memory.held
            add(energy, error, y, deviation, FACTORS, widths=widths)
            found.append(memory.most - before)
    assert found[0] == found[1] >= 2 * y.nbytes


def test_bytes_are_counted_while_tensors_exist():
    with MetaTensors() as memory:
        x = torch.empty(1000, device=META)
        y = x + 1  # 4,000 bytes each
        view = y.view(10, 100)
        del y
        assert memory.held == memory.most == 8000
        del view
        assert memory.held == 4000
        real = torch.ones(1000, dtype=torch.bool, device=META)
        assert x[real].shape == (1000,) and bool(torch.isfinite(x).all()) and not bool(x.max() > 65504)
        assert x.cpu().is_meta and torch.arange(3).tolist() == [0, 1, 2]
        heads = torch.empty(1, 4, 50, 8, device=META)
        before = memory.most = memory.held
        found = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        assert memory.most - before == found.nbytes  # and no 50 x 50


@pytest.mark.full
def test_the_page_shows_what_the_command_prints(monkeypatch, capsys, tmp_path):
    """Except the time, and bytes that depend on the lengths of the versions' names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "measured_pace", lambda *_: PACE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert main(["fit", "--config", "tiny.yaml", "--plan"]) == 0
    shown = example(PAGE.read_text())
    printed = capsys.readouterr().out.rstrip()
    assert machines_own(shown) and untimed(shown) == untimed(printed)


def test_the_table_on_the_page_is_the_run():
    run = json.loads((ROOT / "benchmarks/results/plan_cpu.json").read_text())["models"]
    begin, end = "<!-- plan table -->\n", "\n<!-- end of plan table -->"
    shown = PAGE.read_text().partition(begin)[2].partition(end)[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in shown[2:]]
    expected = {}
    for name, found in run.items():
        expected |= {f"{name}, {kind} bytes": found[f"{kind}_bytes"] for kind in ("artifact", "checkpoint", "host")}
        caches = found["cache_bytes"]
        expected[f"{name}, bytes of the caches of {len(caches)} methods"] = caches
        expected |= {f"{name}, seconds, {stage}": one for stage, one in found["seconds"].items()}
    assert [cell[0] for cell in cells] == list(expected)
    for row, told, measured, ratio in cells:
        one = expected[row]
        if "caches" in row:
            ratios = [share for cache in one.values() for part in cache.values() for share in part["ratio"]]
            assert (told, measured, ratio) == ("", "", f"{min(ratios):.3f} ... {max(ratios):.3f}")
        else:
            digits = ",.1f" if "seconds" in row else ",d"
            assert told == " and ".join(f"{x:{digits}}" for x in one["planned"])
            assert measured == f"{one['measured']:{digits}}"
            assert ratio == " and ".join(f"{x:.2f}" for x in one["ratio"])
