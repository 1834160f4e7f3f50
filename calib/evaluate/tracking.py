"""Logs a run to Weights & Biases: a table for each column, and the written files. Offline unless the user is logged in."""

from pathlib import Path

from calib.evaluate.figures import scalars
from calib.evaluate.run_file import Run, titles
from calib.loggers import run_logger

SIZES = ("bits_per_value", "paper_counting", "measured_bytes", "host_bytes")


def track(run: Run, folder: Path, files: dict[str, Path]) -> None:
    """Logs a run that has measured at least one cell.

    Args:
        run: the content of `results.json`.
        folder: receives the offline run, or CSV files if W&B is not installed.
        files: the written files, by the kind under which they are logged.
    """
    logger = run_logger(folder, run["config"]["name"])
    logger.log_hyperparams({**run["config"], **run["versions"]})
    for title in titles(run):
        cells = [cell for cell in run["cells"] if cell["column"] == title and "figures" in cell]
        names = scalars([cell["figures"] for cell in cells])
        rows = [
            [
                *(cell["name"], cell["method"]),
                *(cell["figures"].get(name) for name in names),
                *(cell["sizes"][name] for name in SIZES),
                cell["seconds"],
            ]
            for cell in cells
        ]
        logger.log_table(f"eval/{title}", ["name", "method", *names, *SIZES, "seconds"], rows)
    for kind, path in files.items():
        logger.log_file(path, kind)
    logger.close()
