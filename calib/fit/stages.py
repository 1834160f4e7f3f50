"""Runs the stages of a fit one after another, each with its own Trainer and checkpoint.

    runs/NAME/statistics.ckpt   runs/NAME/sensitivity.ckpt   runs/NAME/clip.ckpt   runs/NAME/evaluate.ckpt

Dictionaries are trained after these stages (`dictionaries.py`).
A checkpoint holds all statistics so far, merged over all processes. `--ckpt_path last` resumes from the newest one: finished
stages are not run again, and the unfinished one continues with the batch after its last checkpoint. The order of batches is
fixed and sums are stored in full precision, so the artifact has the same bytes as after an uninterrupted run. On a signal a
stage ends after the current batch and is saved.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only

from calib.capture.data import CaptureData
from calib.fit.calibration import Calibration
from calib.fit.processes import together
from calib.fit.stage import Stage
from calib.interrupts import held
from calib.stage_checkpoint import StageCheckpoint, load_checkpoint

MakeTrainer = Callable[[str, list[Callback]], Trainer]


def run_stages(
    calibration: Calibration,
    data: CaptureData,
    make_trainer: MakeTrainer,
    folder: Path,
    plan: Mapping[str, Any],
    resume: bool,
    stages: Sequence[Stage],
) -> None:
    """Runs the stages that are not finished; afterwards the statistics of `calibration` that `stages` fill are complete.

    Args:
        calibration: prepared for the model.
        data: with the model and the corpus loaded.
        make_trainer: returns a Trainer for the stage of that name, with the given callbacks.
        folder: the run's folder.
        plan: all settings that the statistics depend on, plain numbers and texts; a checkpoint with others is refused.
        resume: continue from the checkpoints in `folder`; otherwise they are removed.
        stages: in order: all stages of the fit, or those that no shard has measured.
    """
    calibration.plan = dict(plan)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {stage.name: folder / f"{stage.name}.ckpt" for stage in stages}
    done = dict.fromkeys(paths, 0)
    finished: set[str] = set()
    if resume:
        for name, progress in restore(calibration, paths, plan):
            done[name] = progress["seen"]
            finished |= {name} if progress["finished"] else set()
    else:
        remove(folder)
    for stage in stages:
        if stage.name in finished:
            continue
        data.read(stage.part, calibration.limits.get(stage.name), skip=done[stage.name])
        keeper = StageCheckpoint(paths[stage.name], calibration.checkpoint_batches, calibration.gather)
        trainer = make_trainer(stage.name, [keeper])
        data.trainer = trainer
        calibration.begin(stage, done[stage.name], trainer.is_global_zero)
        with held(), together():
            trainer.fit(calibration, datamodule=data)


@rank_zero_only
def remove(folder: Path) -> None:
    """Removes the checkpoints of an earlier run, so that resuming this run cannot load them."""
    for path in folder.glob("*.ckpt"):
        path.unlink(missing_ok=True)


def restore(
    calibration: Calibration, paths: Mapping[str, Path], plan: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Loads the newest checkpoint into `calibration`; returns, for each stage that has one, its name and progress."""
    found = []
    for name, path in paths.items():
        if not path.exists():
            break
        progress = load_checkpoint(calibration, path, plan, "calibration")
        found.append((name, progress))
        if not progress["finished"]:
            break
    return found
