"""Runs that stop, go on, begin with exported weights, and export their best checkpoint."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from toy_pretraining import pretrain

from benchmarks.embedded_model.language_model import LanguageModel

QUIET = ("--trainer.logger", "false")


@pytest.fixture(scope="module")
def exported(prose, tmp_path_factory):
    """A model that a first run has exported."""
    folder = tmp_path_factory.mktemp("first run")
    assert pretrain(folder, prose, *QUIET) == 0
    return folder / "model"


@pytest.fixture
def watched(monkeypatch):
    """Losses and validation scores as runs computed them, and a switch that makes a step fail like a killed process."""
    run = SimpleNamespace(losses=[], scores=[], fail_at=[])
    step_of, end_of = LanguageModel.training_step, LanguageModel.on_validation_epoch_end

    def step(self, batch, batch_index):
        if self.global_step in run.fail_at:
            raise RuntimeError("the power went")
        loss = step_of(self, batch, batch_index)
        run.losses.append((self.global_step, loss.item()))
        return loss

    def validated(self):
        end_of(self)
        run.scores.append((self.global_step, self.trainer.callback_metrics["val/score"].item()))

    monkeypatch.setattr(LanguageModel, "training_step", step)
    monkeypatch.setattr(LanguageModel, "on_validation_epoch_end", validated)
    return run


def record(folder: Path) -> list:
    """The training record of an export."""
    return json.loads((folder / "training.json").read_text())["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("continued", [False, True], ids=["from random weights", "from exported weights"])
def test_an_interrupted_run_resumes_exactly(prose, tmp_path, watched, exported, continued):
    words = (*QUIET, *(("--init_from", str(exported)) if continued else ()))
    assert pretrain(tmp_path / "straight", prose, *words) == 0
    losses, scores = dict(watched.losses), dict(watched.scores)
    assert list(losses) == list(range(6))
    assert len(set(losses.values())) == 6
    assert list(scores) == [2, 4, 6]

    watched.losses.clear()
    watched.scores.clear()
    watched.fail_at.append(5)
    assert pretrain(tmp_path / "broken", prose, *words) == 1
    assert not (tmp_path / "broken/model").exists()
    watched.fail_at.clear()
    assert pretrain(tmp_path / "broken", prose, *words, "--ckpt_path", "last") == 0
    assert [step for step, _ in watched.losses] == [0, 1, 2, 3, 4, 4, 5]  # the last validation was after four steps
    assert all(loss == losses[step] for step, loss in watched.losses)
    assert dict(watched.scores) == scores
    straight, broken = tmp_path / "straight/model", tmp_path / "broken/model"
    assert (straight / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    assert record(straight)[-1]["exported_step"] == record(broken)[-1]["exported_step"]


@pytest.mark.full
def test_a_run_that_learns_nothing_exports_what_it_began_with(prose, tmp_path, exported):
    """So all weights were loaded and none was drawn anew; tokenizer and training record were taken over, too."""
    assert pretrain(tmp_path, prose, *QUIET, "--init_from", str(exported), "--model.learning_rate", "0") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (exported, tmp_path / "model"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (exported / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    assert not (tmp_path / "tokenizer").exists()
    first, second = record(tmp_path / "model")
    assert first == record(exported)[0]
    assert first["init"] is None
    assert second["init"]["name"] == "model"
    assert len(second["init"]["weights_sha256"]) == 64
    card = (tmp_path / "model/README.md").read_text()
    assert "### Run 2: from the weights of run 1, a fresh optimizer" in card
    assert str(tmp_path) not in card + json.dumps(record(tmp_path / "model"))


@pytest.mark.slow
def test_the_best_validation_is_exported(prose, tmp_path, monkeypatch):
    def falling(self):
        self.log("val/score", -float(self.global_step))

    monkeypatch.setattr(LanguageModel, "on_validation_epoch_end", falling)
    assert pretrain(tmp_path, prose, *QUIET) == 0
    assert record(tmp_path / "model")[0]["exported_step"] == 2
    files = {file.name for file in (tmp_path / "run/checkpoints").iterdir()}
    assert files == {"best-step=2.ckpt", "last.ckpt"}
    best, last = (
        torch.load(tmp_path / "run/checkpoints" / name, weights_only=True)["state_dict"] for name in sorted(files)
    )
    weights = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(weight, best[f"model.{name}"].half()) for name, weight in weights.items())
    assert any(not torch.equal(weight, last[f"model.{name}"].half()) for name, weight in weights.items())


@pytest.mark.full
def test_weights_of_another_shape_are_refused_in_one_line(prose, tmp_path, exported, capsys):
    def message(*more):
        status = pretrain(tmp_path, prose, *QUIET, *more)
        return status, capsys.readouterr().err.strip().splitlines()[-1]

    status, text = message("--init_from", str(exported), "--model.mlp", "64")
    assert status == 2
    assert f"init_from: {exported} has mlp=48, this run asks for 64: continue with the shape of the weights" in text
    status, text = message("--init_from", str(exported), "--model.vocabulary", "700", "--data.vocabulary", "700")
    assert status == 2
    assert "has vocabulary=600, this run asks for 700" in text
    status, text = message("--init_from", str(exported), "--model.rope_theta", "500")
    assert status == 2
    assert "rope_theta" in text
    status, text = message("--init_from", str(tmp_path / "gone"))
    assert status == 2
    assert "is no model folder" in text
    assert not (tmp_path / "model").exists()
