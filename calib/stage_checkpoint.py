"""A stage's checkpoint: written atomically, also when a signal ends the run, and loaded only under the same settings."""

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
    """Writes a checkpoint under a temporary name in the same folder and renames it.

    Lightning's own TorchCheckpointIO makes a second copy of the bytes in memory and writes them into the system's temporary
    folder, where a killed process leaves them.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves; if the process is killed meanwhile, the previous checkpoint remains. Raises RunError if the disk is full, say."""
        try:
            with saving(), atomically(path) as temporary, open(temporary, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch's message has only file offsets
            if not isinstance(reason, OSError):
                raise
            raise RunError(
                f"the checkpoint {path} cannot be written ({reason.strerror}); make room, then --ckpt_path last goes on from "
                "the one before"
            ) from error


class SignalCallback(Callback):
    """Ends a Trainer between two batches after a signal; to be used inside `calib.interrupts.held`."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reinstalls our SIGTERM handler: Lightning has just replaced it with one that would exit with status 0."""
        take_back()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leaves if one of the processes has received a signal."""
        if self.ended(trainer):
            leave()

    def ended(self, trainer: Trainer) -> bool:
        """Returns whether the run is to end, because some process received a signal: the same answer in every process."""
        if not trainer.strategy.reduce_boolean_decision(pending() is not None, all=False):
            return False
        agreed()
        return True


class StageCheckpoint(SignalCallback):
    """Saves the running stage every few batches, and when a signal ends it.

    Args:
        path: of the checkpoint.
        every: batches between checkpoints.
        gather: called in every process, with the device on which to exchange tensors, before an unfinished stage is saved; the
            checkpoint holds the first process's state after it. The stage is saved once more at its end. None if every process
            has the whole state after each `every` batches; then the stage is saved only there.
    """

    def __init__(self, path: Path, every: int, gather: Callable[[torch.device], None] | None = None) -> None:
        self.path, self.every, self.gather = path, every, gather

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after every `every` batches, and after a signal in a run of one process; leaves after a signal."""
        ended = self.ended(trainer)
        if self.gather is not None and trainer.is_last_batch:
            return  # the stage's end follows at once and is saved
        # With several processes sums are merged at each checkpoint, so a signal must not add one and change their order.
        early = ended and self.gather is not None and trainer.world_size == 1
        if early or not (batch_idx + 1) % self.every:
            if self.gather is not None:
                self.gather(trainer.strategy.root_device)
            self.save(trainer)
        if ended:
            leave()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the finished stage. Raises UsageError if a callback, such as Timer, ended it early."""
        if self.gather is not None:
            if trainer.should_stop:
                raise UsageError(ENDED_EARLY)
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Writes the checkpoint; if the process is killed meanwhile, the previous one remains."""
        trainer.save_checkpoint(self.path, weights_only=True)


def load_checkpoint(module: LightningModule, path: Path, plan: Mapping[str, Any], progress: str) -> dict[str, Any]:
    """Loads the checkpoint at `path` into `module`; returns its entry named by `progress`.

    Raises:
        UsageError: the checkpoint was written with another `plan`; the message names the first setting that differs.
        RunError: the checkpoint cannot be read.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state, before, found = checkpoint["state_dict"], checkpoint["plan"], checkpoint[progress]
        # Settings are compared first, as other settings may give tensors of other shapes.
        for key in sorted(before.keys() | plan.keys()):
            if before.get(key) != plan.get(key):
                raise UsageError(
                    f"the unfinished run in {path.parent} had {key} = {before.get(key)}, now it is {plan.get(key)}: "
                    "give it the same settings, or start anew without --ckpt_path last"
                )
        module.load_state_dict(state)
    except UsageError:
        raise
    except Exception as error:  # a damaged file raises errors of many types
        raise RunError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}); start anew without --ckpt_path last"
        ) from error
    return found
