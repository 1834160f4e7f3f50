"""`calib export --format compressed-tensors`: names, shapes and values of the scales for every model family, and reading the folder
with compressed-tensors and transformers."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from toy_fp8_export import FAMILIES, family_model, needs_compressed_tensors, random_ranges, save_artifact
from transformers import AutoModelForCausalLM

from calib.commands.export import run
from calib.errors import UsageError

INDEX = "model.safetensors.index.json"
SHARD = "model-kv-scales.safetensors"


def export(*words):
    return run(["--format", "compressed-tensors", *map(str, words)])


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """A function from a family to its model, the model's folder, an artifact's path and the artifact's ranges; each made once."""
    made = {}

    def toy(family, **saving):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model, ranges = family_model(family), random_ranges(family_model(family))
            model.save_pretrained(folder / "model", **saving)
            (folder / "model" / "tokenizer.json").write_text("{}")
            artifact = save_artifact(folder / "a.safetensors", model, ranges)
            made[family] = model, folder / "model", artifact, ranges
        return made[family]

    return toy


def expected(ranges, stream, granularity, layer, headroom=1.0):
    """Scales of a layer by their definition, headroom * max |x| / 448, in Python numbers: one, or one for each head."""
    low, high = ranges[f"{stream}.low"][layer].tolist(), ranges[f"{stream}.high"][layer].tolist()
    heads = [headroom * max(map(abs, a + b)) / 448 for a, b in zip(low, high, strict=True)]
    return [max(heads)] if granularity == "tensor" else heads


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_values(family, granularity, toys, tmp_path, capsys):
    _, folder, artifact, ranges = toys(family)
    words = ["--artifact", artifact, "--model", folder, "--output", tmp_path / "out", "--scales-only"]
    assert export(*words, "--granularity", granularity) == 0
    weights = [name for name in load_file(folder / "model.safetensors") if "vision" not in name]
    modules = [
        name.rpartition(".")[0].rpartition(".")[0] for name in weights if re.search(r"\.(k|qkv)_proj\.weight$", name)
    ]
    tensors = load_file(tmp_path / "out" / SHARD)
    assert set(tensors) == {f"{module}.{letter}_scale" for module in modules for letter in "kv"} and len(tensors) == 6
    for name, tensor in tensors.items():
        stream = "keys" if name.endswith("k_scale") else "values"
        wanted = expected(ranges, stream, granularity, int(name.split(".layers.")[1].split(".")[0]))
        assert tensor.dtype == torch.float32 and tensor.shape == (
            (1,) if granularity == "tensor" else (len(wanted), 1, 1)
        )
        assert tensor.flatten().tolist() == pytest.approx(wanted, rel=1e-6), name
    text = capsys.readouterr().out
    assert ("have a sliding window and scales" in text) == (family in ("mistral", "gemma2", "gemma3", "gemma3-vision"))


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors_and_transformers_read_it(family, granularity, toys, tmp_path):
    needs_compressed_tensors()
    from compressed_tensors import quantization as compressed

    model, folder, artifact, _ = toys(family)
    output = tmp_path / "out"
    assert export("--artifact", artifact, "--model", folder, "--output", output, "--granularity", granularity) == 0

    # The schema drops none of our fields and adds only defaults; the rest of the configuration is the model's.
    config = json.loads((output / "config.json").read_text())
    said = config["quantization_config"]
    parsed = compressed.QuantizationConfig.model_validate(said)
    dumped = parsed.model_dump(mode="json")
    assert {name: dumped[name] for name in said} == said
    assert parsed.kv_cache_scheme.pytorch_dtype() == torch.float8_e4m3fn
    assert json.loads((folder / "config.json").read_text()) == {k: v for k, v in config.items() if v is not said}

    # The parameters that compressed-tensors adds to an empty model have the names and shapes of our file's tensors.
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    compressed.apply_quantization_config(empty, parsed, show_progress=False)
    made = {name: p.shape for name, p in empty.named_parameters() if name.endswith(("_scale", "_zero_point"))}
    # The multimodal Gemma 3 is saved under the parameter names of its first release.
    tensors = {
        name.replace("language_model.model", "model.language_model"): tensor
        for name, tensor in load_file(output / SHARD).items()
    }
    assert {name: tensor.shape for name, tensor in tensors.items()} == made

    # transformers loads them from the folder, together with the weights.
    loaded, told = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in (tensors | model.state_dict()).items())


def test_the_folder(toys, tmp_path, capsys):
    _, folder, artifact, _ = toys("llama")
    output = tmp_path / "deep" / "out"
    assert export("--artifact", artifact, "--model", folder, "--output", output) == 0
    assert {path.name for path in output.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", INDEX, SHARD, "model-weights.safetensors",
    }  # fmt: skip
    assert os.path.samefile(output / "model-weights.safetensors", folder / "model.safetensors")
    assert not os.path.samefile(output / "tokenizer.json", folder / "tokenizer.json")
    index = json.loads((output / INDEX).read_text())
    total = 0
    for name in {*index["weight_map"].values()}:
        with safe_open(output / name, framework="pt") as file:
            assert {weight for weight, position in index["weight_map"].items() if position == name} == set(file.keys())
            assert file.metadata() == {"format": "pt"}
            total += sum(file.get_tensor(weight).nbytes for weight in file.keys())  # noqa: SIM118
    assert index["metadata"]["total_size"] == total
    text = capsys.readouterr().out
    assert text.startswith("fp8 scales of 3 attention layers, one for each layer\n") and f"wrote {output}\n" in text

    # A second export gives the same bytes, with `--copy` instead of hard links.
    again = tmp_path / "again"
    assert export("--artifact", artifact, "--model", folder, "--output", again, "--copy") == 0
    for path in output.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    assert (again / "model-weights.safetensors").stat().st_nlink == 1


def test_several_shards_and_tied_weights(tmp_path):
    model = family_model("gemma2")  # its head is its embedding
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    shards = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2
    artifact = save_artifact(tmp_path / "a.safetensors", model, random_ranges(model))
    assert export("--artifact", artifact, "--model", tmp_path / "model", "--output", tmp_path / "out") == 0
    before, after = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("model", "out"))
    tensors = load_file(tmp_path / "out" / SHARD)
    assert after["weight_map"] == before["weight_map"] | dict.fromkeys(tensors, SHARD)
    assert "lm_head.weight" not in after["weight_map"]
    added = sum(tensor.nbytes for tensor in tensors.values())
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"] + added
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == sorted([*shards, SHARD])


def test_only_the_scales_go_into_the_model_s_own_folder(toys, tmp_path):
    _, folder, artifact, ranges = toys("llama")
    output = tmp_path / "out"
    words = ["--artifact", artifact, "--model", folder, "--output", output]
    assert export(*words, "--scales-only", "--headroom", 2) == 0
    assert {path.name for path in output.iterdir()} == {"config.json", INDEX, SHARD}
    positions = json.loads((output / INDEX).read_text())["weight_map"]
    assert set(positions.values()) == {SHARD, "model.safetensors"}
    tensors = load_file(output / SHARD)
    found = tensors["model.layers.1.self_attn.v_scale"].tolist()
    assert found == pytest.approx(expected(ranges, "values", "tensor", 1, headroom=2), rel=1e-6)


def test_layers_and_heads_that_calibration_did_not_see(tmp_path, capsys):
    model = family_model("llama")
    model.save_pretrained(tmp_path / "model")
    ranges = random_ranges(model)
    for end in ("low", "high"):
        ranges[f"keys.{end}"][1] = 0  # a layer's keys
        ranges[f"values.{end}"][2, 0] = 0  # one head's values
    artifact = save_artifact(tmp_path / "a.safetensors", model, ranges)
    words = [
        "--artifact",
        artifact,
        "--model",
        tmp_path / "model",
        "--output",
        tmp_path / "out",
        "--granularity",
        "head",
    ]
    assert export(*words, "--scales-only") == 0
    assert "calibration saw no keys or no values of layers 1: their scale is 1\n" in capsys.readouterr().out
    tensors = load_file(tmp_path / "out" / SHARD)
    assert tensors["model.layers.1.self_attn.k_scale"].flatten().tolist() == [1.0, 1.0]
    seen = expected(ranges, "values", "head", 1)
    assert tensors["model.layers.1.self_attn.v_scale"].flatten().tolist() == pytest.approx(seen, rel=1e-6)
    other = expected(ranges, "values", "head", 2)[1]
    assert tensors["model.layers.2.self_attn.v_scale"].flatten().tolist() == pytest.approx([other, other], rel=1e-6)


def test_weights_quantised_by_compressed_tensors_keep_their_configuration(tmp_path, capsys):
    model = family_model("llama")
    model.save_pretrained(tmp_path / "model")
    artifact = save_artifact(tmp_path / "a.safetensors", model, random_ranges(model))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    present = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"quantization_config": present}))
    words = ["--artifact", artifact, "--model", tmp_path / "model", "--output", tmp_path / "out"]
    with pytest.raises(UsageError, match=r"weights of this model cannot be compared \(quantised"):
        export(*words)
    assert export(*words, "--allow-finetuned") == 0
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["kv_cache_scheme"]["strategy"] == "tensor"
    assert said | {"kv_cache_scheme": None} == present
    needs_compressed_tensors()
    from compressed_tensors import quantization as compressed

    assert compressed.QuantizationConfig.model_validate(said).config_groups["group_0"].weights.num_bits == 8


def test_the_documented_commands(toys, tmp_path, monkeypatch):
    _, folder, artifact, _ = toys("llama")
    (tmp_path / "my-llama").symlink_to(folder)
    (tmp_path / "my.calib.safetensors").symlink_to(artifact)
    document = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in document.splitlines() if line.startswith("    calib export")]
    monkeypatch.chdir(tmp_path)
    assert [run(words[2:]) for words in commands] == [0, 0, 0]
    for words in commands:
        assert (tmp_path / words[words.index("--output") + 1] / SHARD).is_file()
