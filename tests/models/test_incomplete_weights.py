"""Checkpoints without all of their weights: refused in one line, where transformers would draw what is missing at random."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_language_model import toy_tokenizer
from toy_models import random_model

from calib.capture.language_model import load
from calib.cli import main
from calib.errors import UsageError

KEYS = "model.layers.1.self_attn.k_proj.weight"
REMEDY = "give all files of one checkpoint, with its own config.json"


@pytest.fixture
def folder(tmp_path):
    random_model("llama").save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder, alter):
    weights = load_file(folder / "model.safetensors")
    alter(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_weight_is_named(folder, capsys):
    change(folder, lambda weights: weights.pop(KEYS))
    assert main(["generate", "--model", str(folder), "--method", "rtn", "--prompt", "the"]) == 2
    error = capsys.readouterr().err
    assert f"lacks {KEYS} of its configuration; {REMEDY}" in error and error.count("\n") == 1


def test_a_configuration_with_more_layers_than_the_file(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(
        UsageError, match=r"lacks model\.layers\.2\.\S+ and 8 more weights of its configuration; give all"
    ):
        load(str(folder), "float32")


def test_a_weight_of_another_shape_is_named_with_both(folder):
    change(folder, lambda weights: weights.update({KEYS: torch.zeros(3, 5)}))
    with pytest.raises(
        UsageError, match=r"k_proj\.weight with shape \[3, 5\], expected \[64, 64\] by its configuration"
    ):
        load(str(folder), "float32")


def test_tied_embeddings_are_stored_once(tmp_path):
    random_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model, _ = load(str(tmp_path), "float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_configuration_with_fewer_layers_than_the_file(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert main(["generate", "--model", str(folder), "--method", "rtn", "--prompt", "the"]) == 2
    error = capsys.readouterr().err
    left_out = "model.layers.1.input_layernorm.weight and 8 more weights"
    assert f"has {left_out} that its configuration leaves out; {REMEDY}" in error
    assert error.count("\n") == 1
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    assert len(load(str(folder), "float32")[0].model.layers) == 1  # the second is for multi-token prediction


def test_a_bias_that_the_configuration_leaves_out(folder):
    change(folder, lambda weights: weights.update({KEYS.replace("weight", "bias"): torch.ones(64)}))
    with pytest.raises(
        UsageError, match=r"has model\.layers\.1\.self_attn\.k_proj\.bias that its configuration leaves out"
    ):
        load(str(folder), "float32")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale", "model.mtp.0.norm.weight",
        "vision_tower.layers.7.weight", "score.weight",
    ],
)  # fmt: skip
def test_other_weights_that_are_not_loaded_pass(folder, name):
    change(folder, lambda weights: weights.update({name: torch.ones(8)}))
    assert load(str(folder), "float32")
