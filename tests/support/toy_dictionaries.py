"""Vectors that are sparse in a small dictionary, dictionary-learning tasks of them, and a Trainer without output."""

import warnings
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from calib.neural_dict.dictionary import Task
from calib.neural_dict.options import DictionaryOptions
from calib.neural_dict.training import train

OPTIONS = DictionaryOptions(batch_size=32, epochs=4, learning_rate=0.02)
ATOMS, SPARSITY = 32, 3


def vectors(count, channels, seed, hidden=48):
    """Random sums of three of `hidden` directions, float32 `[count, channels]`; the directions depend on `seed` alone."""
    directions = torch.nn.functional.normalize(torch.randn(hidden, channels, generator=draw(f"{seed}")), dim=1)
    chosen = torch.randint(hidden, (count, 3), generator=draw(f"{seed}/{count}"))
    weights = torch.randn(count, 3, 1, generator=draw(f"{seed}/{count}/weights"))
    return (directions[chosen] * weights).sum(1)


def draw(key):
    """A generator seeded by `key`."""
    return torch.Generator().manual_seed(int.from_bytes(key.encode()) % 2**62)


def task(name="keys.0", samples=400, channels=12, seed=0, atoms=ATOMS, sparsity=SPARSITY):
    return Task(name, vectors(samples, channels, seed), vectors(100, channels, seed), atoms, sparsity)


def tasks():
    """Three tasks that differ in samples, channels and atoms."""
    return [task("keys.0"), task("keys.1", samples=333, seed=1), task("values.0", channels=7, seed=2, atoms=40)]


def make_trainer(stage, callbacks, **more):
    """A Trainer with the settings of `FitCLI.stage_trainer`, on the CPU."""
    warnings.filterwarnings("ignore", message=".*configure_optimizers.* returned `None`.*")
    silent = dict.fromkeys(("enable_checkpointing", "enable_model_summary", "enable_progress_bar", "logger"), False)
    return Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **{**silent, **more})


def fit(folder: Path, some=None, options=OPTIONS, seed=0, resume=False, plan=None, make=make_trainer):
    """Run `train` with its checkpoint in `folder`."""
    path = folder / "dictionaries.ckpt"
    return train(some or tasks(), options, seed, make, path, {"data.length": 64} if plan is None else plan, resume)


def same(one, other):
    """Whether two runs gave the same dictionaries, to the bit, and the same figures."""
    assert one.keys() == other.keys()
    return all(
        torch.equal(a.atoms, b.atoms)
        and (a.initial_loss, a.loss, a.epochs, a.dead) == (b.initial_loss, b.loss, b.epochs, b.dead)
        for a, b in ((one[name], other[name]) for name in one)
    )
