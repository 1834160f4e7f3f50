"""`calib pretrain`: trains the small language model from a YAML configuration and exports it."""

import warnings
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser

from calib.errors import RunError, UsageError
from calib.lightning_cli import CalibCLI
from calib.testbed.export import check_output, export
from calib.testbed.language_model import LanguageModel
from calib.testbed.pretraining_data import PretrainingData

RUN_FOLDER = "runs/tiny_lm"


def checkpoint_folder(root: str | None) -> str:
    """Where a run keeps its checkpoints."""
    return str(Path(root or RUN_FOLDER) / "checkpoints")


class PretrainCLI(CalibCLI):
    """Adds the checkpoints, below the run's folder, and the folder of the export."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--output", type=Path, default=Path("artifacts/tiny-llama"), help="folder of the export")
        parser.add_argument(
            "--score_cases", type=int, default=200, help="retrieval cases behind each figure of the card"
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.every_n_train_steps": 250, "checkpoint.save_last": True})
        parser.link_arguments("trainer.default_root_dir", "checkpoint.dirpath", compute_fn=checkpoint_folder)


def run(argv: list[str]) -> int:
    """Trains to the last step, then exports; returns the exit status."""
    cli = PretrainCLI(
        "pretrain", LanguageModel, PretrainingData, argv, trainer_defaults={"default_root_dir": RUN_FOLDER}
    )
    trainer, config = cli.trainer, cli.config
    if trainer.max_steps < 1:
        raise UsageError(
            "trainer.max_steps is not set: the curriculum and the schedule are shares of it; give a number"
        )
    if cli.datamodule.vocabulary != cli.model.hparams.vocabulary:
        raise UsageError(
            f"data.vocabulary={cli.datamodule.vocabulary} and model.vocabulary={cli.model.hparams.vocabulary} differ"
        )
    check_output(config.output)  # before the hour, not after it
    # Lightning asks for a loader with a state of its own; ours goes on from the trainer's step, which is exact.
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    checkpoint = resume_file(config.ckpt_path, trainer.default_root_dir)
    trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint, weights_only=True)
    if trainer.global_step < trainer.max_steps:
        raise RunError(f"stopped at step {trainer.global_step} of {trainer.max_steps}; --ckpt_path last goes on")
    print(export(cli.model, cli.datamodule, config.output, trainer.max_steps, config.score_cases))
    return 0


def resume_file(wanted: str | None, root: str) -> str | None:
    """The checkpoint to go on from; UsageError when there is none."""
    if wanted is None:
        return None
    file = Path(checkpoint_folder(root)) / "last.ckpt" if wanted == "last" else Path(wanted)
    if not file.is_file():
        raise UsageError(f"no checkpoint {file}: start without --ckpt_path, or name an existing one")
    return str(file)
