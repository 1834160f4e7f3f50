"""The LightningModule that trains all dictionaries of a model in one run, dealt out over the processes.

A process trains every world-th group, alone; gradients meet nowhere. When an epoch ends, every group's state is sent to
all processes: each can then save or load the whole, also in a run of another number of processes, and each ends with all
dictionaries. A process without a group, or whose groups have stopped, takes part in nothing but that exchange.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import distributed, nn

from calib.neural_dict.dictionary import FIGURES, NeuralDictionary, Task
from calib.neural_dict.options import DictionaryOptions
from calib.side_by_side import side_by_side

PARTS = 8  # of an epoch: the Trainer's steps; each is many batches, beside which its own work costs nothing


class NeuralDictionaries(LightningModule):
    """All dictionaries; a step of the Trainer is one part of an epoch of each group that this process trains.

    Args:
        tasks: the dictionaries to be trained, in an order that all processes share.
        options: for all of them.
        seed: another seed gives other dictionaries.
        plan: what the dictionaries depend on; a checkpoint carries it.
    """

    def __init__(self, tasks: Sequence[Task], options: DictionaryOptions, seed: int, plan: Mapping[str, Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.dictionaries = nn.ModuleList(NeuralDictionary(task, options, seed) for task in tasks)
        self.plan, self.total, self.epoch = dict(plan), options.epochs, 0

    def all(self) -> Iterator[NeuralDictionary]:
        """Every dictionary."""
        for dictionary in self.dictionaries:
            assert isinstance(dictionary, NeuralDictionary)
            yield dictionary

    def own(self) -> list[NeuralDictionary]:
        """Those that this process trains."""
        return list(self.all())[self.trainer.global_rank :: self.trainer.world_size]

    def left(self) -> range:
        """The numbers of the Trainer's steps that are left; none where all groups have stopped."""
        over = all(dictionary.stopped for dictionary in self.all())
        return range(0) if over else range(self.epoch * PARTS, self.total * PARTS)

    def on_train_start(self) -> None:
        """This process's samples go to the device, all of them; dictionaries that begin get their centroids."""
        side_by_side(NeuralDictionary.begin, self.own(), self.device)
        if self.epoch == 0:
            self.exchange()
            self.tell({f"{one.task.name}/validation": float(one.losses[0]) for one in self.all()})

    def training_step(self, number: int, batch_idx: int) -> None:
        """Step `number` of the whole run."""
        part, own = number % PARTS, [dictionary for dictionary in self.own() if not dictionary.stopped]
        side_by_side(lambda dictionary: dictionary.train_part(part, PARTS), own, self.device)
        if part < PARTS - 1:
            return
        side_by_side(NeuralDictionary.end_epoch, own, self.device)
        self.epoch += 1
        self.exchange()
        # A group that stopped before this epoch has run fewer.
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
        """Every process gets the state of every group from the one that trains it."""
        if self.trainer.world_size == 1:
            return
        for position, dictionary in enumerate(self.all()):
            for tensor in dictionary.state_dict().values():
                distributed.broadcast(tensor, src=position % self.trainer.world_size)

    def tell(self, figures: Mapping[str, float]) -> None:
        """Figures of the epoch that has ended to the loggers, numbered by epochs also where a run was resumed."""
        for logger in self.trainer.loggers:
            logger.log_metrics({f"dictionaries/{name}": figure for name, figure in figures.items()}, step=self.epoch)

    def on_fit_end(self) -> None:
        """Samples and optimizers go; the state stays."""
        for dictionary in self.own():
            dictionary.end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds how far the training has come, and under which settings."""
        checkpoint["dictionaries"], checkpoint["plan"] = {"epoch": self.epoch}, dict(self.plan)

    def configure_optimizers(self) -> None:
        """None of Lightning's: every dictionary has its own, whose moments are buffers."""
