"""A stage's checkpoint: written whole or not at all, at a signal too, and read back under the same settings only."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from calib.errors import RunError, UsageError
from calib.interrupts import agreed, leave, pending, saving, take_back
from calib.runtime.files.atomic_file import atomically

ENDED_EARLY = "trainer.callbacks: one of them ended a stage early, and a fit reads every batch; leave it out"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name beside it and renames.

    Lightning's own holds the bytes in memory once more and writes them into the machine's folder for temporary files,
    where a killed process leaves them.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves; a run that is killed leaves the checkpoint before. Raises RunError where the disk does not allow it."""
        try:
            with saving(), atomically(path) as temporary, open(temporary, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch tells of positions in the file
            if not isinstance(reason, OSError):
                raise
            raise RunError(
                f"the checkpoint {path} cannot be written ({reason.strerror}); make room, then --ckpt_path last goes on from "
                "the one before"
            ) from error


class SignalCallback(Callback):
    """Ends a Trainer at a signal, between two batches: to be used inside `calib.interrupts.held`."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning has just put its own SIGTERM handler before ours: it would end the process with status 0."""
        take_back()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leaves where one of the processes has got a signal."""
        if self.ended(trainer):
            leave()

    def ended(self, trainer: Trainer) -> bool:
        """Whether the run is to end, the same in every process: they end together."""
        if not trainer.strategy.reduce_boolean_decision(pending() is not None, all=False):
            return False
        agreed()
        return True


class StageCheckpoint(SignalCallback):
    """Saves the stage under way every few batches, and where a signal ends it.

    Args:
        path: of the checkpoint.
        every: batches.
        gather: called in every process, with the device to exchange tensors on, before an unfinished stage is saved: the
            checkpoint is what the first process holds then. Such a stage is saved once more when it has ended. None where
            every process holds the whole after each `every` batches, and can go on from there alone.
    """

    def __init__(self, path: Path, every: int, gather: Callable[[torch.device], None] | None = None) -> None:
        self.path, self.every, self.gather = path, every, gather

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves where it is time, or the last time."""
        ended = self.ended(trainer)
        if self.gather is not None and trainer.is_last_batch:
            return  # a stage is never left with nothing to do but its end, which is saved
        # Several processes: sums are added in the order of the checkpoints, which a signal may not change.
        early = ended and self.gather is not None and trainer.world_size == 1
        if early or not (batch_idx + 1) % self.every:
            if self.gather is not None:
                self.gather(trainer.strategy.root_device)
            self.save(trainer)
        if ended:
            leave()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the stage that has ended. Raises UsageError where a callback has ended it, such as Timer."""
        if self.gather is not None:
            if trainer.should_stop:
                raise UsageError(ENDED_EARLY)
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Writes the checkpoint: a killed run leaves the one before."""
        trainer.save_checkpoint(self.path, weights_only=True)


def load_checkpoint(module: LightningModule, path: Path, plan: Mapping[str, Any], progress: str) -> dict[str, Any]:
    """Loads the checkpoint at `path` into `module`; returns its entry `progress`.

    Raises:
        UsageError: it belongs to another `plan`; the message names the setting.
        RunError: it cannot be read.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state, before, found = checkpoint["state_dict"], checkpoint["plan"], checkpoint[progress]
        # Settings first: other ones may mean tensors of other shapes.
        for key in sorted(before.keys() | plan.keys()):
            if before.get(key) != plan.get(key):
                raise UsageError(
                    f"the unfinished run in {path.parent} had {key} = {before.get(key)}, now it is {plan.get(key)}: "
                    "give it the same settings, or start anew without --ckpt_path last"
                )
        module.load_state_dict(state)
    except UsageError:
        raise
    except Exception as error:  # a damaged file fails in many ways; each means the same
        raise RunError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}); start anew without --ckpt_path last"
        ) from error
    return found
