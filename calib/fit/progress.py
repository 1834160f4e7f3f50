"""The progress bar of a stage: its name instead of an epoch's number, since a stage reads its data once."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StageProgressBar(RichProgressBar):
    """RichProgressBar that says which stage is under way.

    Args:
        stage: the stage's name.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(leave=True)
        self.stage = stage

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{self.stage:<10}"

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Without the logger's version, which says nothing about the measurement."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
