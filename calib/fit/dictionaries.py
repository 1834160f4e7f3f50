"""The last stages of a fit: form groups of similar layers and train one dictionary for each group (CSR).

    runs/NAME/dictionaries.ckpt

Grouping takes seconds, so it has no checkpoint of its own. One Trainer trains all dictionaries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.fit.calibration import Calibration
from calib.fit.dictionary_tasks import group_tasks
from calib.fit.processes import together
from calib.fit.stages import MakeTrainer
from calib.layer_groups.divergence import divergences
from calib.layer_groups.grouping import layer_groups, members
from calib.neural_dict.training import STAGE, Fitted, Task, train
from calib.runtime.artifact.tensor_registry import STREAMS
from calib.statistics.vector_samples import VectorSamples


@dataclass(frozen=True)
class Dictionaries:
    """Result of the grouping and training.

    Attributes:
        tensors: the artifact's tensors by name: `{stream}.layer_groups`, `.divergence` and `.dictionary` (float16).
        groups: for each group of each stream a dict of `stream`, `group`, `layers`, `samples` (number of vectors), `atoms`,
            `initial_loss` and `loss` (held-out relative squared error, before and after training), `epochs`, `dead`.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def fit_dictionaries(
    calibration: Calibration,
    make_trainer: MakeTrainer,
    folder: Path,
    plan: Mapping[str, Any],
    seed: int,
    resume: bool,
) -> Dictionaries:
    """Groups the layers and trains the dictionaries; the result is empty if `dictionary.atoms` is 0.

    Args:
        calibration: with all statistics complete.
        make_trainer: returns a Trainer for the stage of that name, with the given callbacks.
        folder: the run's folder.
        plan: the settings that the dictionaries depend on; a checkpoint with other settings is refused.
        seed: of the fit.
        resume: continue from the checkpoint in `folder`; otherwise it is removed.
    """
    options, path = calibration.dictionary, folder / f"{STAGE}.ckpt"
    if not options.atoms:
        return Dictionaries()
    tensors: dict[str, Tensor] = {}
    tasks: list[Task] = []
    layers: dict[str, list[int]] = {}
    for stream in STREAMS:
        samples, heldout = (vectors(calibration, name, stream) for name in ("vectors", "heldout_vectors"))
        reached = sorted(samples)
        divergence = divergences(samples, calibration.shape.layers)
        found = layer_groups(options.groups, stream, divergence, reached, options.delta1, options.delta2)
        tensors |= {f"{stream}.layer_groups": found, f"{stream}.divergence": divergence}
        groups = members(found, reached)
        mine = group_tasks(stream, groups, samples, heldout, options, calibration.shape.kv_heads)
        tasks += mine
        layers |= {task.name: group for task, group in zip(mine, groups, strict=True)}
    with together():
        fitted = train(tasks, options, seed, make_trainer, path, plan, resume)
    for stream in STREAMS:
        atoms = [fitted[task.name].atoms for task in tasks if task.name.startswith(stream)]
        tensors[f"{stream}.dictionary"] = torch.stack(atoms).half()
    return Dictionaries(tensors, [record(task, layers[task.name], fitted[task.name]) for task in tasks])


def vectors(calibration: Calibration, name: str, stream: str) -> dict[int, Tensor]:
    """Returns the sampled vectors of a stream, by layer; `name` is `vectors` or `heldout_vectors`."""
    samples = calibration.statistic(name)
    assert isinstance(samples, VectorSamples)
    return {layer: samples.vectors(layer)[stream] for layer in samples.reached()}


def record(task: Task, layers: list[int], fitted: Fitted) -> dict[str, Any]:
    """Returns a group's entry of `Dictionaries.groups`."""
    stream, _, number = task.name.partition(".")
    return {
        "stream": stream,
        "group": int(number),
        "layers": layers,
        "samples": len(task.samples),
        "atoms": task.atoms,
        "initial_loss": fitted.initial_loss,
        "loss": fitted.loss,
        "epochs": fitted.epochs,
        "dead": fitted.dead,
    }
