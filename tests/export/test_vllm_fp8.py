"""benchmarks/vllm_fp8.py: which scales it expects of an engine; docs/engines.md has the committed run."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import vllm_fp8

PAGE = (Path(__file__).parents[2] / "docs/engines.md").read_text(encoding="utf-8")
LAYERS = {f"model.layers.{number}.self_attn.attn": None for number in range(2)}


def test_the_table_is_the_run():
    rows = json.loads(vllm_fp8.RESULT.read_text())["rows"]
    table = [f"| {row['run']} | {row['right']} of {row['of']} | {row['same_answers']} |\n" for row in rows]
    assert len(table) == 4 and "".join(table) in PAGE


def test_a_checkpoint_without_scales_has_1(tmp_path):
    assert vllm_fp8.scales_of(tmp_path, LAYERS) == {name: [[1.0], [1.0]] for name in LAYERS}


def test_scales_are_those_of_the_file_under_the_names_of_the_engine(tmp_path):
    held = {f"model.layers.{at}.self_attn.{part}_scale": torch.rand(2, 1, 1) for at in range(2) for part in "kv"}
    save_file(held, tmp_path / vllm_fp8.SCALES)
    for name, found in vllm_fp8.scales_of(tmp_path, LAYERS).items():
        stem = name.removesuffix(".attn")
        assert found == [held[f"{stem}.{part}_scale"].flatten().tolist() for part in "kv"]
    with pytest.raises(SystemExit, match="the engine"):
        vllm_fp8.scales_of(tmp_path, {**LAYERS, "model.layers.2.self_attn.attn": None})
