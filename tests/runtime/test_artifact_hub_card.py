"""The card beside an artifact: front matter the hub reads, a load line that works, and everything that was measured."""

import re

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from toy_artifact import TOY_FIGURES, toy_artifact

from calib.runtime import Artifact

HUB_DATA = {"name": "Salesforce/wikitext wikitext-2-raw-v1 train", "tokens": 262144, "sha256": "ab" * 32}


def saved(artifact: Artifact, folder, **options) -> ModelCard:
    artifact.save_pretrained(folder, **options)
    return ModelCard.load(folder / "README.md")


def test_the_front_matter(tmp_path):
    local = saved(toy_artifact(), tmp_path / "a").data.to_dict()
    assert local == {
        "library_name": "calib",
        "tags": ["kv-cache", "kv-cache-compression", "calibration", "safetensors"],
    }
    fitted = toy_artifact(provenance={"config": {"model": "meta-llama/Llama-2-7b-hf"}, "data": HUB_DATA})
    hub = saved(fitted, tmp_path / "b", license="cc-by-4.0").data.to_dict()
    assert hub == local | {
        "base_model": "meta-llama/Llama-2-7b-hf",
        "datasets": ["Salesforce/wikitext"],
        "license": "cc-by-4.0",
    }
    other = saved(fitted, tmp_path / "b", base_model="mine/chat")
    assert other.data.base_model == "mine/chat"
    assert 'from_pretrained("mine/chat")' in other.text
    folder = toy_artifact(provenance={"config": {"model": "my-llama"}, "data": {"name": "a.txt, b.txt"}})
    assert saved(folder, tmp_path / "c").data.to_dict() == local  # local names are not listed as the hub's


def test_the_tables_hold_what_was_measured(tmp_path):
    layers = [{"error_2bit": 0.25 + layer, "layer": layer, "only": [1, 2.5]} for layer in range(2)]
    metrics = {
        "heldout_error": 0.123456,
        "layers": layers,
        "dictionaries": TOY_FIGURES,
        "overall": {"error": 0.5},
        "note": None,
    }
    provenance = {"data": HUB_DATA, "seed": 7, "versions": {"torch": "2.13.0", "calib": "0.1.0"}, "metrics": metrics}
    artifact = toy_artifact(provenance=provenance)
    card = saved(artifact, tmp_path)
    lines = card.text.splitlines()
    print_of_model = artifact.fingerprint
    for row in (
        f"| config_hash | {print_of_model['config_hash']} |",
        "| kv_heads | 2 |",
        "| tokens | 262144 |",
        "| versions | calib 0.1.0, torch 2.13.0 |",
        "| seed | 7 |",
        "| heldout_error | 0.1235 |",
        "| note |  |",
        "| layer | error_2bit | only |",
        "| 1 | 1.25 | 1, 2.5 |",
        "| group | layers | stream | dead | epochs | initial_loss | loss |",
        "| 0 | 0, 1 | values | 1 | 3 | 0.25 | 0 |",
        "| error | 0.5 |",
    ):
        assert row in lines, row
    assert all(value in card.text for value in print_of_model["weights"].values())
    assert f"{len(artifact.tensors)} tensors" in card.text


def test_the_code_of_a_card_loads_the_folder(tmp_path):
    folder = tmp_path / "here"
    card = saved(toy_artifact(), folder, push_to_hub=False)
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    (load,) = [line for line in code.splitlines() if "Artifact.from_pretrained" in line]
    found = {"Artifact": Artifact}
    exec(load.replace("path/to/this/folder", str(folder)), found)
    assert found["artifact"].encoded() == toy_artifact().encoded()
    compile(code, "card", "exec")


@pytest.mark.parametrize("metrics", [None, "many", [1, 2], {"layers": []}, {"layers": [1, {}]}, {"overall": {}}])
def test_provenance_of_any_shape(tmp_path, metrics):
    for provenance in ({}, {"metrics": metrics, "data": 5, "config": [], "versions": None}):
        assert saved(toy_artifact(provenance=provenance, tensors={}), tmp_path).data.library_name == "calib"


def test_hostile_text_stays_text(tmp_path):
    word = '---\nlicense: x\n<script>|`"[a](b)\x1b\u202e'
    provenance = {
        "data": {"name": f"a/b {word}", word: word},
        "config": {"model": f'm")\n{word}'},
        "metrics": {word: [{word: word}]},
    }
    artifact = toy_artifact(provenance=provenance, tensors={"later": torch.zeros(1)})
    card = saved(artifact, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1]).get("license") is None
    for part in ("<script>", "[a](b)", "\x1b", "\u202e", "\nlicense"):
        assert part not in card.text.replace("```", ""), part
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    compile(code, "card", "exec")
    artifact.save_pretrained(tmp_path)  # the card is still recognised as calib's
