"""Fitting in several processes: each reads its share of the batches, and statistics are merged when a stage ends."""

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from calib.errors import UsageError


class MergingStrategy(DDPStrategy):
    """DDP without the wrapper around the module.

    DistributedDataParallel averages gradients, of which a fit has none, and copies the first process's buffers over the
    others' before every step, which would wipe out what they have measured.
    """

    def configure_ddp(self) -> None:
        """Leaves the module as it is."""


def merging_strategy(trainer: Trainer) -> MergingStrategy | None:
    """What the stages' Trainers use in place of DDP; None in a single process.

    Raises UsageError for strategies that split a model: the language model is no part of what they would split.
    """
    if trainer.world_size == 1:
        return None
    if not isinstance(trainer.strategy, DDPStrategy):
        raise UsageError(
            f"trainer.strategy={type(trainer.strategy).__name__}: a fit in several processes runs with strategy 'ddp' or 'auto'"
        )
    return MergingStrategy()
