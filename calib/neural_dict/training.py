"""Trains the dictionaries of a fit, with one Trainer and one checkpoint, in any number of processes.

    runs/NAME/dictionaries.ckpt

The checkpoint is written at the end of each epoch and holds everything that the next epoch depends on, so a run that is killed
and resumed gives the same bytes as an uninterrupted one. On a signal the training ends between two parts of an epoch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from calib.errors import UsageError
from calib.interrupts import held
from calib.neural_dict.dictionary import FIGURES, NeuralDictionary, Task
from calib.neural_dict.module import PARTS, NeuralDictionaries
from calib.neural_dict.options import DictionaryOptions
from calib.stage_checkpoint import ENDED_EARLY, StageCheckpoint, load_checkpoint

STAGE = "dictionaries"

__all__ = ["Fitted", "Task", "train"]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained dictionary.

    Attributes:
        atoms: float32 `[N, d]` on the CPU, rows of length 1: those of the epoch with the least `loss`, or the centroids.
        initial_loss: mean of |x - x^|^2 / |x|^2 over the held-out vectors, with the centroids of k-means as atoms.
        loss: the same mean with `atoms`.
        epochs: number of epochs that were run.
        dead: number of atoms that no vector used in the last epoch.
    """

    atoms: Tensor
    initial_loss: float
    loss: float
    epochs: int
    dead: int


def train(
    tasks: Sequence[Task],
    options: DictionaryOptions,
    seed: int,
    make_trainer: Callable[[str, list[Callback]], Trainer],
    path: Path,
    plan: Mapping[str, Any],
    resume: bool,
) -> dict[str, Fitted]:
    """Trains a dictionary for every task; returns them by name, in every process.

    Args:
        tasks: in the same order in all processes; each is trained by one process.
        options: of the training.
        seed: another seed gives other dictionaries; a dictionary does not depend on the other tasks.
        make_trainer: returns a Trainer for the stage of that name, with the given callbacks, which reads its data once.
        path: of the checkpoint.
        plan: all settings that the dictionaries depend on: plain numbers and texts.
        resume: continue from the checkpoint if there is one; otherwise it is removed.

    Raises:
        UsageError: fewer samples than atoms, no held-out vector, more pairs than channels, a checkpoint of other settings, or a
            callback of the Trainer that ended the training.
        RunError: a checkpoint that cannot be read.
    """
    for task in tasks:
        check(task)
    module = NeuralDictionaries(tasks, options, seed, plan)
    if not resume:
        remove(path)
    elif path.exists():
        module.epoch = load_checkpoint(module, path, module.plan, "dictionaries")["epoch"]
    if module.left():
        trainer = make_trainer(STAGE, [StageCheckpoint(path, PARTS)])
        with held():
            trainer.fit(module, train_dataloaders=module.left())
        if module.left():
            raise UsageError(ENDED_EARLY)
    return {dictionary.task.name: result(dictionary) for dictionary in module.all()}


def check(task: Task) -> None:
    """Raises UsageError if there are too few samples, no held-out vectors, or more pairs than channels."""
    (vectors, width), name = task.samples.shape, f"dictionary {task.name}"
    if task.atoms > vectors:
        raise UsageError(
            f"{name}: {task.atoms} atoms need as many samples and there are {vectors}: give more text or more "
            "model.dictionary.samples, or fewer model.dictionary.atoms"
        )
    if not len(task.heldout):
        raise UsageError(f"{name}: no held-out vector to validate on: give more data.heldout_sequences")
    if not 1 <= task.sparsity <= width:
        raise UsageError(f"{name}: {task.sparsity} pairs for a vector of {width} channels: must be 1 to {width}")


@rank_zero_only
def remove(path: Path) -> None:
    """Removes the checkpoint of an earlier run, so that resuming this run cannot load it."""
    path.unlink(missing_ok=True)


def result(dictionary: NeuralDictionary) -> Fitted:
    """Returns the result of one group's training."""
    initial, best = dictionary.losses.tolist()
    figures = dict(zip(FIGURES, dictionary.figures.tolist(), strict=True))
    return Fitted(dictionary.best.cpu().clone(), initial, best, int(dictionary.epochs[0]), int(figures["dead"]))
