"""Pretraining at toy size: a curriculum of ten steps over a little text, and a training run of six steps."""

from pathlib import Path

import torch

from benchmarks.embedded_model.curriculum import Curriculum
from benchmarks.embedded_model.phase import Phase
from benchmarks.embedded_model.pretrain import main
from calib.documents.running_text import RunningText

CONFIGS = Path(__file__).parents[2] / "benchmarks/embedded_model"
PROSE = "The river ran past the mill, and nobody there could say how old the mill was in 1906.\n"
PHASES = [Phase(0.5, rows=6, length=64, text=0.0, copying=0.5), Phase(0.5, rows=4, length=96, text=0.5)]


def curriculum(tokenizer, steps=10, seed=0, phases=None, prose=None):
    text = torch.arange(300, 1500).to(torch.uint16).numpy()
    running = RunningText(tokenizer, prose) if prose else None
    return Curriculum(phases or PHASES, steps, tokenizer, text, seed, running)


def pretrain(folder: Path, prose: Path, *more: str, configs: tuple[str, ...] = ("tiny_lm.yaml",)) -> int:
    """Run `pretrain` for six steps, validated (and so saved) after every second one; the arguments `more` come last and win."""
    phases = "[{share: 0.5, rows: 2, length: 80, text: 0, copying: 0.5}, {share: 0.5, rows: 2, length: 96}]"
    toy = {
        "model": {"vocabulary": 600, "layers": 1, "hidden": 32, "mlp": 48, "heads": 2, "kv_heads": 1, "head_dim": 16},
        "model.positions": 4096,
        "data.vocabulary": 600,
        "data.phases": phases,
        "data.train.text": f"[{prose}]",
        "data.validation.text": f"[{prose}]",
        "data.validation_windows": 2,
        "data.validation_cases": 2,
        "data.tokenizer": folder / "tokenizer",
        "output": folder / "model",
        "score_cases": 2,
        "trainer.max_steps": 6,
        "trainer.precision": "32-true",
        "trainer.val_check_interval": 2,
        "trainer.log_every_n_steps": 1,
        "trainer.default_root_dir": folder / "run",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    words = []
    for key, value in toy.items():
        for name, part in value.items() if isinstance(value, dict) else [(None, value)]:
            words += [f"--{key}.{name}" if name else f"--{key}", str(part)]
    return main([*(word for name in configs for word in ("--config", str(CONFIGS / name))), *words, *more])
