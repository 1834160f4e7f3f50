"""The progress bar of a stage: it shows the stage's name instead of an epoch number, as a stage reads its data once."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StageProgressBar(RichProgressBar):
    """RichProgressBar that shows the name of the running stage.

    Args:
        stage: the stage's name.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(leave=True)
        self.stage = stage

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{self.stage:<10}"

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Returns the metrics to show, without the logger's version number."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
