"""Running the stages of a fit one after another, each with a Trainer and a checkpoint of its own.

    runs/NAME/statistics.ckpt   runs/NAME/sensitivity.ckpt   runs/NAME/clip.ckpt   runs/NAME/evaluate.ckpt

Dictionaries, which are trained and not measured, come after them (`dictionaries.py`).
A checkpoint holds all statistics so far, of all processes. `--ckpt_path last` goes on from the newest one: stages that
were finished are not run again, and the unfinished one continues with the batch after its last checkpoint. Batches come
in the same order and sums are carried in full, so the artifact has the bytes of an uninterrupted run. A signal ends a stage
after the batch under way, and saves it.
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
    """Runs what is left of the stages; afterwards the statistics of `calibration` that they fill are complete.

    Args:
        calibration: prepared for the model.
        data: loaded.
        make_trainer: a Trainer for the stage of that name, with the given callbacks.
        folder: the run's folder.
        plan: what the statistics depend on: plain numbers and texts.
        resume: go on from the checkpoints in `folder`; otherwise they are removed.
        stages: of the fit, in order: all of them, or those that no shards have measured.
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
    """Removes the checkpoints of an earlier run: none of them may be taken for this one's later on."""
    for path in folder.glob("*.ckpt"):
        path.unlink(missing_ok=True)


def restore(
    calibration: Calibration, paths: Mapping[str, Path], plan: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Loads the newest checkpoint into `calibration`; returns the stages that have one and how far each came."""
    found = []
    for name, path in paths.items():
        if not path.exists():
            break
        progress = load_checkpoint(calibration, path, plan, "calibration")
        found.append((name, progress))
        if not progress["finished"]:
            break
    return found
