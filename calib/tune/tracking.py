"""Logs a run to Weights & Biases: the choices, the front, and the files. Offline unless the user is logged in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calib.html_page.table import Table
from calib.loggers import run_logger
from calib.tune.result import Search, Setting


def track(
    search: Search,
    settings: Mapping[float, Setting],
    front: Sequence[Setting],
    tables: Sequence[Table],
    config: Mapping[str, Any],
    folder: Path,
    files: Mapping[str, Path],
) -> None:
    """Logs a run; `folder` receives the offline run, or CSV files without W&B; keys of `files` are the kinds they are logged as."""
    logger = run_logger(folder, f"tune-{search.method}")
    logger.log_hyperparams(dict(config))
    for step, (budget, setting) in enumerate(settings.items()):
        logger.log_metrics({"budget": budget, "bits": setting.mean_bits, "loss": setting.loss}, step=step)
    logger.log_table("tune/front", ["bits", "loss"], [[one.mean_bits, one.loss] for one in front])
    singles = [
        [str({**one.chosen[0].options, **one.chosen[0].own}), one.mean_bits, one.loss] for one in search.uniforms()
    ]
    logger.log_table("tune/one setting", ["options", "bits", "loss"], singles)
    for number, table in enumerate(tables):
        logger.log_table(
            f"tune/{'budgets' if number == 0 else list(settings)[number - 1]}", list(table.header), table.rows
        )
    for kind, path in files.items():
        logger.log_file(path, kind)
    logger.close()
