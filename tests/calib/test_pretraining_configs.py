"""The shipped curricula run; the second size has heads of 128; the first minutes of the first one teach copying."""

import json
from itertools import pairwise

import pytest
import torch
import yaml
from toy_pretraining import CONFIGS, PROSE, curriculum, pretrain
from transformers import AutoModelForCausalLM

from benchmarks.embedded_model.language_model import LanguageModel
from benchmarks.embedded_model.phase import Phase
from benchmarks.embedded_model.pretrain import main
from benchmarks.embedded_model.token_rows import IGNORED, document_rows
from benchmarks.embedded_model.tokenizer import load_tokenizer
from calib.documents.generators import copying, keyed_random

MEGABYTES = 24  # that the repository gives to the model's folder


@pytest.mark.parametrize("name", ["tiny_lm.yaml", "tiny_lm_continue.yaml"])
def test_every_phase_of_a_shipped_curriculum_gives_batches(tokenizer, name):
    config = yaml.safe_load((CONFIGS / name).read_text())
    phases = [Phase(**{**phase, "digits": tuple(phase.get("digits", (4,)))}) for phase in config["data"]["phases"]]
    steps = config["trainer"]["max_steps"]
    made = curriculum(tokenizer, steps, phases=phases, prose=PROSE * 60)
    starts = [0, *made.ends[:-1]]
    assert made.ends[-1] == steps
    assert all(a < b for a, b in pairwise(starts))
    for phase, start in zip(phases, starts, strict=True):
        batch = made.batch(start)
        assert batch["input_ids"].shape == (phase.rows, phase.length)
        assert batch["input_ids"].numel() == 4096
        assert (batch["labels"] != IGNORED).any(dim=1).all()
    assert phases[-1].length == 1024
    assert phases[-1].needle and phases[-1].number_keys


@pytest.mark.slow
def test_the_second_size_has_heads_of_128_and_fits_the_repository(prose, tmp_path):
    config = yaml.safe_load((CONFIGS / "tiny_lm_128.yaml").read_text())
    shape = [word for key, value in config["model"].items() for word in (f"--model.{key}", str(value))]
    words = [
        *("--trainer.logger", "false", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"),
        *("--data.phases", "[{share: 1, rows: 2, length: 64, text: 0.5}]", "--score_cases", "1"),
        *("--model.vocabulary", "2048", "--data.vocabulary", "2048"),
    ]
    configs = ("tiny_lm.yaml", "tiny_lm_128.yaml")
    assert pretrain(tmp_path, prose, *shape, *words, configs=configs) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    config = model.config
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (128, 4, 2)
    assert 3e6 <= sum(weight.numel() for weight in model.parameters()) <= 20e6
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) < MEGABYTES * 2**20


def copied(model, tokenizer) -> float:
    """Return the share of tokens predicted right in the repetition of 50 sequences of the eval split."""
    documents = [list(copying(keyed_random("copied", index), 12, split="eval")) for index in range(50)]
    ids, labels = (torch.tensor(rows) for rows in zip(*document_rows(tokenizer, documents), strict=True))
    with torch.no_grad():
        predicted = model(input_ids=ids).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return (predicted == wanted)[wanted != IGNORED].float().mean().item()


@pytest.mark.slow
def test_five_minutes_teach_copying(prose, tmp_path, monkeypatch):
    """The config's model and optimizer on the config's first phase: the loss falls, and an induction head forms."""
    losses, step_of = [], LanguageModel.training_step

    def step(self, batch, batch_index):
        loss = step_of(self, batch, batch_index)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", step)
    words = {
        "data.phases": "[{share: 1, rows: 64, length: 64, text: 0.0, copying: 0.5}]",
        "data.train.text": f"[{prose}]",
        "data.validation.text": f"[{prose}]",
        "data.tokenizer": tmp_path / "tokenizer",
        "data.validation_windows": 2,
        "data.validation_cases": 10,
        "output": tmp_path / "model",
        "score_cases": 5,
        "trainer.max_steps": 700,
        "trainer.val_check_interval": 350,
        "trainer.default_root_dir": tmp_path / "run",
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
    }
    flat = [part for key, value in words.items() for part in (f"--{key}", str(value))]
    assert main(["--config", str(CONFIGS / "tiny_lm.yaml"), *flat]) == 0
    first, last = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
    assert last < first / 3
    tokenizer, model = load_tokenizer(tmp_path / "model"), LanguageModel().eval()
    assert copied(model.model, tokenizer) < 0.05
    # Not the export: the best score counts language, which this phase does not teach.
    state = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict(state)
    assert copied(model.model, tokenizer) > 0.5
    assert json.loads((tmp_path / "model/training.json").read_text())["runs"][0]["training_seconds"] > 0
