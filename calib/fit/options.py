"""The options of `calib fit`, and the Trainers they describe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from calib.capture.data import CaptureData
from calib.capture.model_files import model_name
from calib.capture.shard import Shard
from calib.errors import UsageError
from calib.fit.calibration import Calibration
from calib.fit.processes import check_strategy, merging_strategy
from calib.fit.progress import StageProgressBar
from calib.lightning_cli import CalibCLI
from calib.runtime.messages.printable import printable

SUFFIX = ".calib.safetensors"
LARGEST_SEED = 2**32 - 1  # NumPy's

# Trainer options that a fit refuses: it would read fewer batches than the artifact records, or sum in 16 bits. Beside each
# the values, as text, that change nothing: limit_train_batches=1 is one batch, 1.0 is all of them.
LEFT_ALONE = {
    "precision": ("None", "32", "32-true"),
    "fast_dev_run": ("False", "0"),
    "limit_train_batches": ("None", "1.0"),
    "overfit_batches": ("0.0", "0"),
    "max_steps": ("-1",),
    "max_time": ("None",),
    "accumulate_grad_batches": ("1",),
    "gradient_clip_val": ("None",),
}


class FitCLI(CalibCLI):
    """The options of `calib fit`: `model.*`, `data.*`, `trainer.*`, `seed_everything`, `output`, `shard`, `plan*`.

    Args:
        argv: the words after the command.
        shards: the shard files given to `calib merge`; none for `calib fit`.
    """

    def __init__(self, argv: list[str], shards: Sequence[Path] = ()) -> None:
        self.shards = tuple(shards)
        super().__init__(
            "merge" if shards else "fit",
            Calibration,
            CaptureData,
            argv,
            trainer_defaults={
                "max_epochs": 1,
                "enable_checkpointing": False,
                "enable_model_summary": False,
                "use_distributed_sampler": False,
                "log_every_n_steps": 1,
            },
            save_config_callback=None,  # one run has several Trainers; the configuration is saved once, by `fit`
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `output`, `shard` and `plan*`, and links the model's options and the seed to the data module's."""
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--output",
            type=str | None,
            default=None,
            help=f"the artifact to write (default: the model's name, as NAME{SUFFIX})",
        )
        parser.add_argument(
            "--shard",
            type=str | None,
            default=None,
            help="K/N: measure the K-th of N parts of the corpus, in the stages that need no other part, for `calib merge`",
        )
        parser.add_argument(
            "--plan",
            action="store_true",
            help="print what the fit captures, its predicted memory, disk space and time; run nothing",
        )
        parser.add_argument("--plan_batch", type=int, default=1, help="rows of the caches whose sizes --plan predicts")
        parser.add_argument("--plan_context", type=int, default=4096, help="tokens of each row of these caches")
        parser.add_argument("--plan_json", type=str | None, default=None, help="a file for the plan as JSON as well")
        parser.link_arguments("model.path", "data.model_path")
        parser.link_arguments("model.dtype", "data.model_dtype")
        parser.link_arguments("model.device_map", "data.model_device_map")
        parser.link_arguments("model.max_memory", "data.model_max_memory")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=whole_number)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses with the fit's options ordered before those of Lightning's Trainer, in the help text too."""
        theirs = parser.groups["trainer"]
        parser._action_groups.sort(key=lambda group: group is theirs)
        parser._actions.sort(key=lambda action: action.dest.split(".")[0] == "trainer")
        super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        """Checks options whose faults would otherwise show only after hours. Raises UsageError."""
        if self.config.ckpt_path not in (None, "last"):
            raise UsageError(
                f"ckpt_path={printable(self.config.ckpt_path)}: a fit continues with --ckpt_path last, from its own run folder"
            )
        self.shard = None if self.config.shard is None else Shard.of(self.config.shard)
        if self.config.plan and (self.shard or self.shards):
            raise UsageError(
                "plan=True: a plan is for a whole fit on one machine; leave out --shard and the files of shards"
            )
        if self.shard and self.config.output is None:
            raise UsageError(
                f"shard={self.shard}: name the file to write as well, such as --output first.{self.shard.number}.safetensors"
            )
        if self.config.output is None:
            self.config.output = f"{model_name(self.config.model.path)}{SUFFIX}".replace("/", "--")
        output = Path(self.config.output)
        if not output.name.endswith(".safetensors") or output.is_dir():
            raise UsageError(f"output '{output}' must name a file that ends in {SUFFIX}")
        if self.shard and output.name.endswith(SUFFIX):  # most likely the configuration's, and an existing artifact
            raise UsageError(
                f"output '{output}' is an artifact's name, and shard {self.shard} is none; name another file, such as --output "
                f"first.{self.shard.number}.safetensors"
            )
        check_strategy(self.config.trainer.strategy)
        for option, values in LEFT_ALONE.items():
            if str(value := self.config.trainer[option]) not in values:
                raise UsageError(
                    f"trainer.{option}={printable(value)}: a fit reads every batch once and measures in float32; leave it "
                    "out (model.dtype is the model's own, data.sequences how much is read)"
                )
        for option in ("plan_batch", "plan_context"):
            if self.config[option] < 1:
                raise UsageError(f"{option}={self.config[option]}: must be at least 1")
        if self.config.plan_json is not None and not self.config.plan:
            raise UsageError(f"plan_json={self.config.plan_json}: there is no plan to write; add --plan")
        if self.config.plan:  # a plan writes no logs and runs no callbacks
            self.config.trainer.logger, self.config.trainer.callbacks = False, None
        self.folder = Path(self.config.trainer.default_root_dir or Path("runs") / self.name)

    @property
    def name(self) -> str:
        """The run's name: the output file's, without its suffix."""
        return Path(self.config.output).name.removesuffix(".safetensors").removesuffix(".calib")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Returns a Trainer whose root is the run's folder and which reads its data once."""
        return super().instantiate_trainer(default_root_dir=str(self.folder), max_epochs=1, **kwargs)

    def stage_trainer(self, stage: str, callbacks: list[Callback]) -> Trainer:
        """Returns the Trainer of one stage; all stages share the loggers."""
        own = self.config_init["trainer"]["callbacks"] or []
        own = [*own] if isinstance(own, list) else [own]
        if self.config.trainer.enable_progress_bar is not False:
            callbacks = [*callbacks, StageProgressBar(stage)]
        strategy = merging_strategy(self.trainer)
        return self.instantiate_trainer(
            callbacks=[*own, *callbacks],
            logger=self.trainer.loggers or False,
            **({"strategy": strategy} if strategy else {}),
        )


def whole_number(seed: bool | int) -> int:
    """Returns the seed; raises UsageError for others than whole numbers (LightningCLI takes `true` for a random seed)."""
    if isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
        raise UsageError(
            f"seed_everything={printable(seed)}: must be a whole number from 0 to {LARGEST_SEED}; a fit is made to be repeatable"
        )
    return seed
