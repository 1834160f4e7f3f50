"""Exports to compressed-tensors that are refused: each raises one line and leaves no file."""

import json
import os
import shutil

import pytest
from one_line import message
from safetensors.torch import load_file, save_file
from toy_fp8_export import family_model, random_ranges, save_artifact

from calib.commands.export import run
from calib.errors import RunError, UsageError
from calib.export.compressed_tensors import folder as folders

INDEX = "model.safetensors.index.json"


@pytest.fixture
def toy(tmp_path):
    """A folder `model` of a Llama, its artifact `a.safetensors`, and the command that would write `out`."""
    model = family_model("llama")
    model.save_pretrained(tmp_path / "model")
    save_artifact(tmp_path / "a.safetensors", model, random_ranges(model))
    return tmp_path


def refused(toy, *words, error=UsageError, model="model", artifact="a.safetensors", output="out"):
    """Assert that the command raises `error` and leaves no new file; return its message."""
    paths = {"--artifact": toy / artifact, "--model": toy / model, "--output": toy / output}
    before = sorted(os.listdir(toy))
    with pytest.raises(error) as caught:
        run(["--format", "compressed-tensors", *(str(w) for pair in paths.items() for w in pair), *words])
    assert sorted(os.listdir(toy)) == before
    return message(caught)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_words_of_the_command(toy):
    assert "invalid choice: 'channel'" in refused(toy, "--granularity", "channel")
    for value in ("0.5", "17", "nan"):
        assert f"--headroom {value}: must be from 1 to 16" in refused(toy, "--headroom", value)
    assert "not allowed with argument" in refused(toy, "--scales-only", "--copy")
    assert "no such folder" in refused(toy, model="none")
    assert "is no file" in refused(toy, artifact="none")
    assert "is there already" in refused(toy, output="model")
    os.symlink(toy / "nowhere", toy / "link")
    assert "is there already" in refused(toy, output="link")
    with pytest.raises(UsageError, match=r"required: --model, --output"):
        run(["--format", "compressed-tensors", "--artifact", "x"])


def test_another_model(toy):
    relative = family_model("llama")
    relative.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    relative.save_pretrained(toy / "tuned")
    assert "weights differ" in refused(toy, model="tuned")
    family_model("qwen3").save_pretrained(toy / "qwen3")
    assert "architecture differs: this model has qwen3" in refused(toy, model="qwen3")
    words = [
        "--artifact",
        toy / "a.safetensors",
        "--model",
        toy / "tuned",
        "--output",
        toy / "out",
        "--allow-finetuned",
    ]
    assert run(["--format", "compressed-tensors", *map(str, words)]) == 0


def test_an_artifact_without_ranges(toy):
    ranges = random_ranges(family_model("llama"))
    save_artifact(toy / "b.safetensors", family_model("llama"), {"keys.low": ranges["keys.low"]})
    assert "'keys.high' is not in this artifact" in refused(toy, artifact="b.safetensors")
    (toy / "c.safetensors").write_bytes(b"nothing")
    refused(toy, artifact="c.safetensors")


def test_a_model_that_is_quantised_otherwise(toy):
    config = toy / "model" / "config.json"
    edit(config, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised by 'gptq', expected plain weights" in refused(toy)
    edit(config, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}})
    assert "scales of keys and values already" in refused(toy)


def test_a_folder_that_is_no_model_s(toy):
    model = toy / "model"
    (toy / "empty").mkdir()
    assert "config.json: cannot be read as JSON" in refused(toy, model="empty")
    shutil.copytree(model, toy / "old")
    (toy / "old" / "model.safetensors").rename(toy / "old" / "pytorch_model.bin")
    assert "neither model.safetensors nor" in refused(toy, model="old")
    shutil.copytree(model, toy / "cut")
    (toy / "cut" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    assert "cannot be read as safetensors" in refused(toy, model="cut")
    shutil.copytree(model, toy / "list")
    (toy / "list" / "config.json").write_text("[1]")
    assert "expected a JSON object, found list" in refused(toy, model="list")
    shutil.copytree(model, toy / "strange")
    edit(toy / "strange" / "config.json", model_type="strange")
    assert "cannot be built" in refused(toy, model="strange")


def test_an_index_that_promises_too_much(toy):
    family_model("llama").save_pretrained(toy / "shards", max_shard_size="60KB")
    index = toy / "shards" / INDEX
    positions = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=positions | {"model.more.weight": max(positions.values())})
    assert "has no model.more.weight, which" in refused(toy, model="shards")
    edit(index, weight_map=positions | {"model.more.weight": "../a.safetensors"})
    assert "names of files in the same folder" in refused(toy, model="shards")
    edit(index, weight_map=positions)
    (toy / "shards" / min(positions.values())).unlink()
    assert "cannot be read as safetensors" in refused(toy, model="shards")


def test_weights_by_other_names(toy):
    weights = load_file(toy / "model" / "model.safetensors")
    path = toy / "model" / "model.safetensors"
    save_file(
        {name.removeprefix("model."): weight for name, weight in weights.items()}, path, metadata={"format": "pt"}
    )
    line = refused(toy, "--allow-finetuned")
    assert "no weight model.layers.0.self_attn.k_proj.weight, where LlamaForCausalLM has one" in line
    scale = {"model.layers.0.self_attn.k_scale": weights["model.norm.weight"][:1].clone()}
    save_file({**weights, **scale}, path, metadata={"format": "pt"})
    assert "has a tensor model.layers.0.self_attn.k_scale already" in refused(toy)


def test_a_folder_is_whole_or_not_there(toy, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folders.os, "rename", full)
        assert "cannot be written (No space left on device)" in refused(toy, error=RunError)
    with monkeypatch.context() as patched:
        patched.setattr(folders.shutil, "copyfile", full)
        assert "cannot be written" in refused(toy, "--copy", error=RunError)
    monkeypatch.setattr(folders.os, "link", full)  # no links here: copied
    words = ["--artifact", toy / "a.safetensors", "--model", toy / "model", "--output", toy / "out"]
    assert run(["--format", "compressed-tensors", *map(str, words)]) == 0
    copied = toy / "out" / "model-weights.safetensors"
    assert copied.read_bytes() == (toy / "model" / "model.safetensors").read_bytes() and copied.stat().st_nlink == 1
