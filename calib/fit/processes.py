"""Fitting in several processes: each reads its share of the batches, and statistics are merged before they are saved.

Processes wait for each other where they merge, so one that has ended must end the others, or they would wait for as long
as the backend allows, half an hour.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen
from threading import Event, Thread
from typing import ClassVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from calib.errors import RunError, UsageError

INTERVAL = 0.5  # seconds between looks at the other processes
LOST = "another process of this fit has ended before its work; go on with --ckpt_path last once it can run"


class MergingStrategy(DDPStrategy):
    """DDP without the wrapper around the module, and with an eye on the other processes of the machine.

    DistributedDataParallel averages gradients, of which a fit has none, and copies the first process's buffers over the
    others' before every step, which would wipe out what they have measured.
    """

    started: ClassVar[list[Popen[bytes]]] = []  # by this process, in its first stage

    def __init__(self) -> None:
        super().__init__()
        self.over = Event()

    def configure_ddp(self) -> None:
        """Leaves the module as it is."""

    def setup_environment(self) -> None:
        """Begins to watch, before the processes meet."""
        self.started.extend(getattr(self.launcher, "procs", ()))
        parent = os.getppid() if self.local_rank else None
        Thread(target=watch, args=(self.started, parent, self.over), daemon=True).start()
        super().setup_environment()

    def teardown(self) -> None:
        """Ends the watch: from here on nobody waits for another."""
        self.over.set()
        super().teardown()


def watch(children: list[Popen[bytes]], parent: int | None, over: Event) -> None:
    """Until `over`: ends this process with one line where one of `children` has failed or `parent` is gone.

    At once and from a thread of its own: the main one may be inside a collective operation that never returns.
    """
    while not over.wait(INTERVAL):
        if any(child.poll() for child in children) or parent not in (None, os.getppid()):
            print(f"calib: error: {LOST}", file=sys.stderr, flush=True)
            os._exit(1)


@contextmanager
def together() -> Iterator[None]:
    """Inside, a collective operation that fails because another process has ended is that one line."""
    try:
        yield
    except RuntimeError as error:
        # Gloo has no type of its own, and names its own source files in every message.
        if isinstance(error, distributed.DistError) or "/gloo/" in str(error):
            raise RunError(LOST) from error
        raise


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
