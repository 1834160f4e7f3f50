"""The command line of `calib fit`, and of the embedded model's training: LightningCLI with every error as one line.

YAML files, dotted overrides (`--model.bits '[2,4]'`), several `--config` merged from left to right, `--print_config`,
`--ckpt_path last` and every `--trainer.*` option come from LightningCLI. Added here: packaged configurations are found by name
from any folder, the error for an unknown key names the most similar known one, and abbreviated options are refused, since
`--model.bit 2` silently meaning `--model.bits 2` hides a typing error.
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from jsonargparse import get_loader, set_loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import TorchCheckpointIO
from yaml import Node, SafeDumper, YAMLError

from calib.config_files import known_keys, with_config_paths
from calib.config_messages import CLASS, explain
from calib.errors import UsageError
from calib.loggers import run_logger
from calib.runtime.messages.printable import LENGTH, shortened
from calib.stage_checkpoint import AtomicCheckpointIO
from calib.yaml_input import DEPTH, RefusedYamlError, check_yaml


def _value_of(dumper: SafeDumper, one: Enum) -> Node:
    return dumper.represent_data(one.value)


class CalibCLI(LightningCLI):
    """Parses `argv` and builds `self.model`, `self.datamodule` and `self.trainer`; the command runs them.

    Args:
        command: the word after `calib`, for the help text; or a whole program, `python -m NAME`.
        model_class: the LightningModule whose constructor's arguments become `model.*`.
        datamodule_class: the LightningDataModule whose constructor's arguments become `data.*`.
        argv: the words after the command.
        trainer_defaults: defaults of `trainer.*` for this command.

    Raises:
        UsageError: an unknown key, a value of the wrong type, a configuration file that is missing, unreadable or not
            YAML, an option that Trainer refuses.
    """

    def __init__(
        self,
        command: str,
        model_class: type[LightningModule],
        datamodule_class: type[LightningDataModule],
        argv: Sequence[str],
        trainer_defaults: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        quiet_lightning()
        set_loader("yaml", counted(get_loader("yaml")), (YAMLError,))
        SafeDumper.add_multi_representer(Enum, _value_of)  # such as Timer's interval
        self.command = command
        super().__init__(
            model_class,
            datamodule_class,
            args=list(argv),
            run=False,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},  # a resumed run writes into the folder it began in
            trainer_defaults=trainer_defaults,
            parser_kwargs={
                "prog": command if " " in command else f"calib {command}",
                "description": None,
                "exit_on_error": False,
                "allow_abbrev": False,
            },
            **options,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--ckpt_path`, which LightningCLI gives only to its own subcommands."""
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="'last' continues an unfinished run; a file continues from it",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses into `self.config`; raises UsageError, with one line, for every parser error."""
        words = [str(word) for word in args or ()]
        keys = known_keys(parser)
        words = list(with_config_paths(words, keys))
        for word in words:
            try:
                check_yaml(word.partition("=")[2] if word.startswith("-") else word)
            except RefusedYamlError as error:
                raise UsageError(f"{shortened(word, LENGTH)!r} {error}") from error
        try:
            self.config = parser.parse_args(words)
        except argparse.ArgumentError as error:
            raise UsageError(explain(str(error), keys)) from error
        except RecursionError as error:
            raise UsageError(f"cannot read the configuration: nested deeper than {DEPTH} levels") from error
        except (ValueError, TypeError, OSError, YAMLError) as error:
            raise UsageError(f"cannot read the configuration: {' '.join(str(error).split())}") from error

    def instantiate_classes(self) -> None:
        """Builds the parsed classes; raises UsageError for a named class that cannot be built, for lack of a package say."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if CLASS.search(str(error)) is None:
                raise
            raise UsageError(explain(str(error), ())) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds a Trainer that logs to `run_logger` below its root folder (`runs/COMMAND` unless set).

        Trainer checks its own options; what it refuses is a usage error. `--trainer.logger false` logs nothing.
        """
        settings = self.config_init["trainer"]
        root = Path(kwargs.get("default_root_dir") or settings["default_root_dir"] or f"runs/{self.command}")
        kwargs["default_root_dir"] = str(root)
        if "logger" not in kwargs and settings["logger"] in (None, True):
            kwargs["logger"] = run_logger(root, root.name)
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise UsageError(f"trainer: {' '.join(str(error).split())}") from error
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # the default, not one from `--trainer.plugins`
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer


def counted(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the parser's YAML loader `load` with the size check of `check_yaml` first.

    The parser uses it for every text, files that other files name included.
    """
    if hasattr(load, "counted"):
        return load

    def counting(text: str) -> Any:
        check_yaml(text)
        return load(text)

    counting.counted = True  # type: ignore[attr-defined]
    return counting


def quiet_lightning() -> None:
    """Silences Lightning's tips and its notes on hardware and workers; other warnings stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        "does not have many workers",
        "Checkpoint directory .* exists",
        "smaller than the logging",
        "LeafSpec",
    ):
        warnings.filterwarnings("ignore", message=f".*{text}.*")
