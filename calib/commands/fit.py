"""`calib fit --config tiny.yaml`: measures a model's keys and values and writes one artifact; `--plan` predicts the costs."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from calib.interrupts import goes_on_with


def run(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    return run_fit(argv)


def run_fit(argv: list[str], shards: Sequence[Path] = ()) -> int:
    """Runs a fit, starting from the statistics in the files of `shards`, if any; returns the exit status."""
    if "--plan" not in argv:
        goes_on_with("--ckpt_path", "last")
    from calib.fit.options import FitCLI

    for text in (".*configure_optimizers.* returned `None`.*", ".*does not have a .*val_dataloader.*"):
        warnings.filterwarnings("ignore", message=text)
    cli = FitCLI(argv, shards)
    if cli.config.plan:
        from calib.plan.command import tell

        tell(cli)
    else:
        from calib.fit.command import fit
        from calib.fit.processes import ending_together

        with ending_together():
            fit(cli, cli.model, cli.datamodule)
    return 0
