"""A stage's checkpoint: written whole or not at all, and read back under the same settings only."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from calib.errors import RunError, UsageError


class StageCheckpoint(Callback):
    """Saves the stage under way every few batches.

    Args:
        path: of the checkpoint.
        every: batches.
        gather: called in every process, with the device to exchange tensors on, before an unfinished stage is saved: the
            checkpoint is what the first process holds then. Such a stage is saved once more when it has ended. None where
            every process holds the whole at any time.
    """

    def __init__(self, path: Path, every: int, gather: Callable[[torch.device], None] | None = None) -> None:
        self.path, self.every, self.gather = path, every, gather

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves where it is time."""
        if (batch_idx + 1) % self.every:
            return
        if self.gather is not None:
            if trainer.is_last_batch:
                return  # a stage is never left with nothing to do but its end
            self.gather(trainer.strategy.root_device)
        self.save(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the stage that has ended."""
        if self.gather is not None:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Writes under a temporary name and renames: a killed run leaves the checkpoint before."""
        temporary = self.path.with_suffix(".partial")
        trainer.save_checkpoint(temporary, weights_only=True)
        if trainer.is_global_zero:
            os.replace(temporary, self.path)


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
