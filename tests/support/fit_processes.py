"""Runs `calib fit` in several processes, some of which may be killed, and returns their exit statuses and errors.

Lightning's own launcher starts the program anew for each process, which takes seconds of imports every time. Here processes are
forked by `multiprocessing`'s fork server, with the environment variables that a launcher on a cluster sets.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from free_port import free_port

Cut = tuple[int, str, int]  # a process is killed before this batch: its rank, the stage, the batch's number in this run


class End(NamedTuple):
    """The end of one process: its exit status (negative: the signal; None: it was still running) and its standard error."""

    status: int | None
    errors: str


def fit_in_processes(argv: list[str], folder: Path, *cuts: Cut, processes: int = 2, seconds: float = 90) -> list[End]:
    """Run `calib ARGV --trainer.devices PROCESSES` in `folder`; after `seconds`, processes that have not ended are killed."""
    port = free_port()
    words = [*argv, f"--trainer.devices={processes}"]
    return ends(run, [(words, folder, rank, port, cuts) for rank in range(processes)], folder, seconds)


def at_once(commands: list[list[str]], folder: Path, seconds: float = 200) -> list[End]:
    """Run `calib ARGV` of each command in `folder` at the same time, in independent processes."""
    return ends(run_alone, [(argv, folder, number) for number, argv in enumerate(commands)], folder, seconds)


def ends(target: Callable[..., None], given: list[tuple[Any, ...]], folder: Path, seconds: float) -> list[End]:
    """Run `target` at the same time in one process for each tuple of arguments in `given`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["calib.fit.command"])
    runs = [context.Process(target=target, args=own) for own in given]
    for one in runs:
        one.start()
    deadline = time.monotonic() + seconds
    for one in runs:
        one.join(max(0, deadline - time.monotonic()))
    found = [End(one.exitcode, (folder / f"stderr-{number}").read_text()) for number, one in enumerate(runs)]
    for one in runs:
        one.kill()
        one.join()
    return found


def run_alone(argv: list[str], folder: Path, number: int) -> None:
    """Run `calib ARGV` in this process, with its output in the files stdout-NUMBER and stderr-NUMBER."""
    os.chdir(folder)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{name}-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    from calib.cli import main

    sys.exit(main(argv))


def run(argv: list[str], folder: Path, rank: int, port: int, cuts: tuple[Cut, ...]) -> None:
    """Run `calib ARGV` in this process as number `rank` of a fit in several processes, which is killed at its `cuts`."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from calib.fit.calibration import Calibration

    step = Calibration.training_step

    def cut_step(self: Calibration, batch: Any, batch_idx: int) -> None:
        if (rank, self.stage.name, batch_idx) in cuts:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, batch, batch_idx)

    Calibration.training_step = cut_step  # type: ignore[method-assign]
    run_alone(argv, folder, rank)
