"""Fitting in several processes: each reads its share of the batches, and statistics are merged before they are saved.

Processes wait for each other in each merge. So when one has ended early, the others are ended too; otherwise they would
wait until the backend's timeout of half an hour.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pydoc import locate
from subprocess import Popen, TimeoutExpired
from threading import Event, Thread
from typing import Any, ClassVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
)
from torch import distributed

from calib.errors import RunError, UsageError
from calib.interrupts import GRACE, Interrupted, pending

INTERVAL = 0.5  # seconds between checks of the other processes
TOGETHER = 2.0  # seconds that processes have to end by themselves before the first one sends them its signal
SPLITTING = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)  # strategies that shard a model's weights
LOST = "another process of this fit has ended early; remove the cause, then continue with --ckpt_path last"


class MergingStrategy(DDPStrategy):
    """DDP without the DistributedDataParallel wrapper, and with a watch over the other processes of the machine.

    DistributedDataParallel averages gradients, of which a fit has none, and copies the first process's buffers over the
    others' before every step, which would overwrite their statistics.
    """

    started: ClassVar[list[Popen[bytes]]] = []  # processes started by this one, in its first stage
    told: ClassVar[bool] = False  # whether the line about processes waited for was printed

    def __init__(self) -> None:
        super().__init__()
        self.over = Event()

    def configure_ddp(self) -> None:
        """Leaves the module as it is."""

    def setup_environment(self) -> None:
        """Starts the watch thread, then connects the processes."""
        self.started.extend(getattr(self.launcher, "procs", ()))
        parent = os.getppid() if self.local_rank else None
        Thread(target=watch, args=(self.started, parent, self.over), daemon=True).start()
        self._tell()
        super().setup_environment()

    def _tell(self) -> None:
        """Prints once how many processes, not started by this one, the first process waits for (up to half an hour)."""
        found, others = self.cluster_environment, self.num_nodes * self.num_processes - 1 - len(self.started)
        if self.told or not others or found is None or found.global_rank():
            return
        MergingStrategy.told = True
        many = "process" if others == 1 else "processes"
        line = f"calib: waits for {others} other {many} at {found.main_address}:{found.main_port}"
        if self.num_nodes == 1 and "LOCAL_RANK" in os.environ:  # SLURM sets other variables
            line += "; LOCAL_RANK is set, so a launcher must start them: without it this process does"
        print(line, flush=True)

    def teardown(self) -> None:
        """Ends the watch: after this no process waits for another."""
        self.over.set()
        super().teardown()


def watch(children: list[Popen[bytes]], parent: int | None, over: Event) -> None:
    """Ends this process with one line if one of `children` has failed or `parent` is gone; returns when `over` is set.

    Runs in its own thread and ends the process directly, because the main thread may be inside a collective operation
    that never returns. After a signal it waits 2 * GRACE seconds first, so that the process can save.
    """
    while not over.wait(INTERVAL):
        if not any(child.poll() for child in children) and parent in (None, os.getppid()):
            continue
        if number := pending():
            if not over.wait(2 * GRACE):
                os._exit(128 + number)
            return
        print(f"calib: error: {LOST}", file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def ending_together() -> Iterator[None]:
    """Context in which a signal that ends this process is passed on to started processes that do not end by themselves."""
    try:
        yield
    except Interrupted as error:
        deadline = time.monotonic() + TOGETHER
        for child in MergingStrategy.started:
            try:
                child.wait(max(0, deadline - time.monotonic()))
            except TimeoutExpired:
                child.send_signal(error.number)
        raise


@contextmanager
def together() -> Iterator[None]:
    """Context in which a collective operation that fails because another process has ended raises RunError with one line."""
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no type of their own; every message names one of Gloo's source files.
        if isinstance(error, distributed.DistError) or "/gloo/" in str(error):
            raise RunError(LOST) from error
        raise


def check_strategy(asked: Any) -> None:
    """Raises UsageError for a strategy that shards a model's weights over processes, before anything is loaded.

    The language model is no submodule of what the Trainer trains, so such a strategy would not shard it.

    Args:
        asked: `trainer.strategy` as configured: one of Lightning's names, or a class path with arguments.
    """
    path = getattr(asked, "class_path", None)
    if path is not None:
        name, kind = path.rpartition(".")[2], locate(path)
    else:
        name = str(asked).lower()  # as Lightning reads it; the registry's own `get` would build the strategy
        kind = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else None
    if isinstance(kind, type) and issubclass(kind, SPLITTING):
        raise UsageError(
            f"trainer.strategy={name} splits the weights that are trained, and a fit trains none of the language model's: for a "
            "model that fits on no device give model.device_map=auto, for several devices that each hold it trainer.devices=N"
        )


def merging_strategy(trainer: Trainer) -> MergingStrategy | None:
    """Returns the strategy of the stages' Trainers: a MergingStrategy instead of DDP, None for one process without DDP.

    Raises UsageError for any other strategy that runs in several processes.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        return MergingStrategy()
    if trainer.world_size == 1:
        return None
    raise UsageError(
        f"trainer.strategy={type(trainer.strategy).__name__}: a fit in several processes runs with strategy 'ddp' or 'auto'"
    )
