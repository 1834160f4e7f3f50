"""The LightningModule that trains all dictionaries of a model in one run, distributed over the processes.

With n processes each one trains every n-th group by itself; gradients are not exchanged. When an epoch ends, every group's state
is sent to all processes. So each can save the whole state, a run can resume with another number of processes, and each process
ends with all dictionaries. A process without groups, or whose groups have stopped, takes part only in this exchange.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import distributed, nn

from calib.neural_dict.dictionary import FIGURES, NeuralDictionary, Task
from calib.neural_dict.options import DictionaryOptions
from calib.side_by_side import side_by_side

PARTS = 8  # Trainer steps of an epoch; each trains many batches, so the Trainer's overhead does not matter


class NeuralDictionaries(LightningModule):
    """All dictionaries; a step of the Trainer trains one part of an epoch for each group of this process.

    Args:
        tasks: the dictionaries to be trained, in the same order in all processes.
        options: for all of them.
        seed: another seed gives other dictionaries.
        plan: the settings that the dictionaries depend on; stored in checkpoints.
    """

    def __init__(self, tasks: Sequence[Task], options: DictionaryOptions, seed: int, plan: Mapping[str, Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.dictionaries = nn.ModuleList(NeuralDictionary(task, options, seed) for task in tasks)
        self.plan, self.total, self.epoch = dict(plan), options.epochs, 0

    def all(self) -> Iterator[NeuralDictionary]:
        """Yields every dictionary."""
        for dictionary in self.dictionaries:
            assert isinstance(dictionary, NeuralDictionary)
            yield dictionary

    def own(self) -> list[NeuralDictionary]:
        """Returns the dictionaries that this process trains."""
        return list(self.all())[self.trainer.global_rank :: self.trainer.world_size]

    def left(self) -> range:
        """Returns the numbers of the Trainer's steps that are left; none if all groups have stopped."""
        over = all(dictionary.stopped for dictionary in self.all())
        return range(0) if over else range(self.epoch * PARTS, self.total * PARTS)

    def on_train_start(self) -> None:
        """Moves all samples of this process to the device; new dictionaries get their centroids."""
        side_by_side(NeuralDictionary.begin, self.own(), self.device)
        if self.epoch == 0:
            self.exchange()
            self.tell({f"{one.task.name}/validation": float(one.losses[0]) for one in self.all()})

    def training_step(self, number: int, batch_idx: int) -> None:
        """Runs step `number` of the whole run; the last step of an epoch validates and exchanges the groups' states."""
        part, own = number % PARTS, [dictionary for dictionary in self.own() if not dictionary.stopped]
        side_by_side(lambda dictionary: dictionary.train_part(part, PARTS), own, self.device)
        if part < PARTS - 1:
            return
        side_by_side(NeuralDictionary.end_epoch, own, self.device)
        self.epoch += 1
        self.exchange()
        # Groups that stopped in an earlier epoch have no new figures.
        ran = [dictionary for dictionary in self.all() if int(dictionary.epochs[0]) == self.epoch]
        self.tell(
            {
                f"{one.task.name}/{name}": figure
                for one in ran
                for name, figure in zip(FIGURES, one.figures.tolist(), strict=True)
            }
        )
        mean = sum(float(dictionary.losses[1]) for dictionary in self.all()) / len(self.dictionaries)
        self.log("error", mean, prog_bar=True, logger=False)
        self.trainer.should_stop = not self.left()

    def exchange(self) -> None:
        """Sends every group's state from the process that trains it to all others."""
        if self.trainer.world_size == 1:
            return
        for position, dictionary in enumerate(self.all()):
            for tensor in dictionary.state_dict().values():
                distributed.broadcast(tensor, src=position % self.trainer.world_size)

    def tell(self, figures: Mapping[str, float]) -> None:
        """Logs figures of the finished epoch, with the epoch's number as the step, in resumed runs too."""
        for logger in self.trainer.loggers:
            logger.log_metrics({f"dictionaries/{name}": figure for name, figure in figures.items()}, step=self.epoch)

    def on_fit_end(self) -> None:
        """Frees samples and optimizers; the state stays."""
        for dictionary in self.own():
            dictionary.end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the number of finished epochs and the settings that the dictionaries depend on."""
        checkpoint["dictionaries"], checkpoint["plan"] = {"epoch": self.epoch}, dict(self.plan)

    def configure_optimizers(self) -> None:
        """Returns no optimizer: every dictionary has its own, whose moments are buffers."""
