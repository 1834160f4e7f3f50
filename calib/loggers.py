"""Loggers of a run: Weights & Biases (offline unless the user is logged in), or CSV files if it is not installed.

Beside Lightning's metrics both loggers take tables (`log_table`) and files (`log_file`, the fitted artifact). An error inside
a logger becomes one warning, and the run goes on. Nothing about the machine is sent with the metrics: console capture, program
arguments, requirements and git state are switched off.
"""

import csv
import hashlib
import inspect
import os
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only

from calib.runtime.files.atomic_file import atomically

PROJECT = "calib"
Rows = Sequence[Sequence[float | int | str]]


def run_logger(folder: Path, name: str) -> "OfflineFirstWandbLogger | TableCSVLogger":
    """Returns the logger of one run: W&B if it is installed, starts and is not switched off (WANDB_MODE=disabled), else CSV.

    Args:
        folder: the run's folder; everything is written below it.
        name: the run's name as it appears in the list of runs.
    """
    if find_spec("wandb") is None or os.environ.get("WANDB_MODE") == "disabled":
        return TableCSVLogger(folder, name="csv")
    try:
        return OfflineFirstWandbLogger(folder, name)
    except Exception as error:
        warnings.warn(f"W&B did not start ({' '.join(str(error).split())}); metrics go to CSV files", stacklevel=2)
        return TableCSVLogger(folder, name="csv")


def logged_in() -> bool:
    """Returns whether W&B has credentials, without a prompt: by `login(prompt=False)`, or `api` in older releases."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None


class Observer:
    """Mixin for loggers that cannot end a run: their first error becomes one warning, and after it nothing is logged."""

    title: ClassVar[str]  # the logger's name in the warning
    _failed = False

    def _try(self, action: Callable[[], Any]) -> None:
        """Runs `action` unless logging has failed before."""
        if self._failed:
            return
        try:
            action()
        except Exception as error:
            if not self._failed:  # a nested `_try`, when the run could not start, has warned already
                self._failed = True
                warnings.warn(f"{self.title} stopped logging: {' '.join(str(error).split())}", stacklevel=3)


class OfflineFirstWandbLogger(Observer, WandbLogger):
    """WandbLogger that never prompts for a key, sends nothing unless the user has logged in, and cannot end a run.

    Args:
        folder: receives `wandb/offline-run-*`, which `wandb sync` uploads later.
        name: the run's name.
    """

    title = "W&B"

    def __init__(self, folder: Path, name: str) -> None:
        import wandb

        online = os.environ.get("WANDB_MODE", "online") == "online" and logged_in()
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            mode="online" if online else "offline",
            console="off",
            disable_git=True,
            disable_code=True,
            silent=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        super().__init__(name=name, save_dir=folder, project=PROJECT, settings=settings)
        self._wandb_init.pop("anonymous", None)  # W&B warns about it even when it is None

    @property
    def experiment(self) -> Any:
        """W&B's run, or a dummy if it could not start: a Trainer reads this property too, and must not get the error."""
        if self._experiment is None:
            self._try(lambda: super(OfflineFirstWandbLogger, self).experiment)
        return DummyExperiment() if self._experiment is None else self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Records the configuration."""
        self._try(lambda: super(OfflineFirstWandbLogger, self).log_hyperparams(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Records scalars at a step."""
        self._try(lambda: super(OfflineFirstWandbLogger, self).log_metrics(metrics, step))

    @rank_zero_only
    def log_table(self, key: str, columns: list[str], data: Rows) -> None:
        """Records a table of numbers and words.

        Args:
            key: the table's name.
            columns: one name a column.
            data: rows as long as `columns`.
        """
        rows = [list(row) for row in data]
        self._try(lambda: super(OfflineFirstWandbLogger, self).log_table(key, columns=columns, data=rows))

    @rank_zero_only
    def log_file(self, path: Path, kind: str) -> None:
        """Records a file by content, as a W&B artifact named after it.

        Args:
            path: the file.
            kind: the W&B artifact's type, such as `calibration`.
        """
        import wandb

        def add() -> None:
            artifact = wandb.Artifact(path.name.replace(".", "-"), type=kind)
            artifact.add_file(str(path), name=path.name)
            self.experiment.log_artifact(artifact)

        self._try(add)

    @rank_zero_only
    def close(self) -> None:
        """Writes pending records and ends the run, so that this process can start another.

        `finish` alone returns before the last records are in the file: W&B's own process writes them, and ends with
        `teardown`.
        """
        import wandb

        if self._experiment is not None and wandb.run is not None:
            self._try(wandb.finish)
            self._try(wandb.teardown)


class TableCSVLogger(Observer, CSVLogger):
    """CSVLogger with `log_table` and `log_file`: tables become CSV files, and files are copied beside them."""

    title = "CSV"

    @property
    def experiment(self) -> Any:
        """The writer of metrics, or a dummy if its folder cannot be made."""
        if self._experiment is None:
            self._try(lambda: super(TableCSVLogger, self).experiment)
        return DummyExperiment() if self._experiment is None else self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        """Records the configuration."""
        self._try(lambda: super(TableCSVLogger, self).log_hyperparams(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Records scalars at a step; the file is written every 100 steps and by `save`."""
        self._try(lambda: super(TableCSVLogger, self).log_metrics(dict(metrics), step))

    @rank_zero_only
    def log_table(self, key: str, columns: list[str], data: Rows) -> None:
        """Writes `KEY.csv` (slashes in `key` become dashes) into the run's log folder."""

        def write() -> None:
            folder = Path(self.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{key.replace('/', '-')}.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([columns, *data])

        self._try(write)

    @rank_zero_only
    def log_file(self, path: Path, kind: str) -> None:
        """Copies the file into the run's log folder, under `KIND-<first digits of its SHA-256>-NAME`."""

        def copy() -> None:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
            with atomically(Path(self.log_dir) / f"{kind}-{digest}-{path.name}") as temporary:
                shutil.copyfile(path, temporary)

        self._try(copy)

    @rank_zero_only
    def save(self) -> None:
        """Writes pending metrics; the Trainer calls it when a stage ends."""
        self._try(super().save)

    @rank_zero_only
    def close(self) -> None:
        """Writes pending metrics."""
        self.save()
