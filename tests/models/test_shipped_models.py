"""`calib fit --config NAME.yaml` on a toy model of each model's real class, and every method with the artifact that it writes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import BY_NAME, CASES
from models import baichuan2
from models.published import PUBLISHED, VOCABULARY, heads_of, save_toy_of, toy_of
from one_line import message
from toy_language_model import save_text
from transformers import AutoModelForCausalLM, PreTrainedModel

from calib.capture.capture import stream
from calib.cli import main
from calib.config_files import find_config
from calib.runtime import Artifact, compress
from calib.runtime.methods import METHODS
from calib.runtime.rotation import Rotation

QUICK = [
    "--data.length=64", "--data.sequences=4", "--data.heldout_sequences=1", "--model.clip_sequences=1", "--model.query_rows=4",
    "--model.clip_factors=[1,0.8]", "--model.dictionary.samples=512", "--model.dictionary.heldout_samples=128",
    "--model.dictionary.epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false",
    "--trainer.enable_progress_bar=false", "--model.device_map=null", "--model.rotations=true",
]  # fmt: skip
# One case of each method, which reads the artifact if a case does; for methods that are not named here the first case.
CHOSEN = [
    "full", "rtn-4-calibrated", "kivi-2-calibrated", "zipcache-calibrated", "mikv-calibrated", "h2o", "streaming_llm",
    "gear-calibrated", "gear_l", "uniform", "group_wise", "outlier_reduced", "csr-offline", "klt-short", "specache", "infllm",
    "offload", "oracle",
]  # fmt: skip
CHOSEN += {
    case.method: case.name for case in reversed(CASES) if case.method not in {BY_NAME[n].method for n in CHOSEN}
}.values()
EXACT = {case.method for case in CASES if case.marginal_bits == 16}  # methods that keep all tokens exact on the device
# Models with another one's architecture: only `full` and cases that read the artifact are run.
LIKE_ANOTHER = {"llama2_chat", "llama2_13b", "llama3"}
PROMPTS, NEW = (180, 101, 140), 6

DOCUMENT = Path("docs/models.md").read_text()
LONGROPE = "Phi3ForCausalLM has RoPE of type 'longrope', whose frequencies change with the length"
REFUSED = {
    ("phi3_128k", "csr"): f"{LONGROPE}; use a method that keeps keys after RoPE, such as 'kivi'",
    ("phi3_128k", "kvquant"): f"{LONGROPE}; use a method that keeps keys after RoPE, such as 'kivi'",
    ("phi3_128k", "streaming_llm"): f"{LONGROPE}; use positions='original'",
    ("phi3_128k", "infllm"): f"{LONGROPE}; use positions='original'",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def documented(begin: str) -> list[str]:
    """Arguments of the only command in docs/models.md that begins with `begin`."""
    (line,) = [line.strip() for line in DOCUMENT.splitlines() if line.startswith(f"    {begin}")]
    return line.partition("#")[0].split()[1:]


def fit_words(name: str) -> list[str]:
    """Save a toy of the model of `name`.yaml; return the arguments that fit it, as in docs/models.md."""
    save_text(Path("corpus.txt"))
    if name == "baichuan2":
        convert = documented("calib convert baichuan2")
        baichuan2.save(Path(convert[2]))
        assert main(convert) == 0
        return [*documented("calib fit --config baichuan2.yaml"), "--data.text=corpus.txt"]
    save_toy_of(name, Path("my-llama"))
    local = documented("calib fit --config llama2.yaml")
    return ["fit", "--config", f"{name}.yaml", *local[3:]]


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_is_fitted_and_every_method_generates(name):
    nuq = [] if (name, "kvquant") in REFUSED else ["--model.nuq=[0.01]"]
    assert main([*fit_words(name), *QUICK, *nuq]) == 0
    config = yaml.safe_load(find_config(f"{name}.yaml").read_text())
    artifact = Artifact.load(config["output"])
    path = config["model"]["path"] if name == "baichuan2" else "my-llama"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    check_artifact(artifact, config["model"], heads_of(PUBLISHED[name])[3])
    check_methods(name, model, artifact)


def check_artifact(artifact: Artifact, asked: dict[str, Any], head_dim: int) -> None:
    """Assert that the artifact has the tensors that the configuration asks for, for 2 layers and 2 KV heads of the published
    width."""
    assert artifact.provenance["config"]["dtype"] == asked["dtype"]
    assert artifact.clip_bits == tuple(asked["bits"])
    assert artifact.tensors["keys.low"].shape == (2, 2, head_dim)
    assert artifact.tensors["values.residual.1x*.2"].shape == (2, 2, 8, head_dim)
    atoms, chunks = asked["dictionary"]["atoms"], asked["dictionary"].get("value_chunks")
    assert ("keys.dictionary" in artifact.tensors) == bool(atoms)
    if atoms:
        assert artifact.tensors["keys.dictionary"].shape[1:] == (2 * atoms, head_dim)
        assert artifact.tensors["values.dictionary"].shape[1:] == (2 * atoms, head_dim // chunks)


def check_methods(name: str, model: PreTrainedModel, artifact: Artifact) -> None:
    """Generate from a ragged batch with each method: logits are finite and the cache is smaller than with `full`, or the method is
    refused as in `REFUSED`."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]
    tokens = torch.randint(3, VOCABULARY, mask.shape, generator=draw) * mask
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(**inputs, **settings)
    full = 0
    for case in map(BY_NAME.__getitem__, CHOSEN):
        if name in LIKE_ANOTHER and not (case.artifact or case.method == "full"):
            continue
        if line := REFUSED.get((name, case.method)):
            with pytest.raises(ValueError, match=re.escape(line)) as error:
                compress(model, case.method, artifact, **case.options)
            assert message(error)
            continue
        with compress(model, case.method, artifact, **case.options) as cache:
            out = model.generate(
                **inputs, **settings, past_key_values=cache, return_dict_in_generate=True, output_logits=True
            )
            memory = cache.memory()
        assert out.sequences.shape == plain.shape and torch.equal(out.sequences[:, :-NEW], tokens), case
        assert all(bool(torch.isfinite(step).all()) for step in out.logits), case
        if case.method == "full":
            assert torch.equal(out.sequences, plain)
            full = memory.measured_bytes
        assert case.method in EXACT or memory.measured_bytes < full, f"{case}: {memory.measured_bytes} of {full}"


def test_every_method_is_among_them():
    assert {BY_NAME[name].method for name in CHOSEN} == set(METHODS)


# Not the models whose projections are fused.
@pytest.mark.parametrize("name", ["llama3_1", "mistral", "qwen2_5", "qwen3", "gemma2", "gemma3"])
def test_keys_turn_as_the_models_own(name):
    """`Rotation` applied to keys before RoPE gives the model's own keys, in the layers that a cache compresses. (Gemma 3's other
    layers have other frequencies.)"""
    model, samples = toy_of(name), []
    tokens = torch.randint(3, VOCABULARY, (1, 120), generator=torch.Generator().manual_seed(0))
    stream(model, tokens, torch.ones_like(tokens, dtype=torch.bool), torch.arange(120)[None], samples.append)
    rotation = Rotation.of(model, "no remedy")
    compressed = [sample for sample in samples if sample.window is None]
    assert len(compressed) == (1 if name.startswith("gemma") else 2)
    for sample in compressed:
        cos, sin = (part[:, None] for part in rotation.at(sample.positions))
        torch.testing.assert_close(
            rotation.rotated(sample.keys_before_rope, cos, sin), sample.keys, rtol=1e-4, atol=1e-3
        )
