"""What a run leaves in Weights & Biases: a table a column, and the files that were written. Offline unless one is logged in."""

from pathlib import Path

from calib.evaluate.figures import scalars
from calib.evaluate.run_file import Run, titles
from calib.loggers import run_logger

SIZES = ("bits_per_value", "paper_counting", "measured_bytes", "host_bytes")


def track(run: Run, folder: Path, files: dict[str, Path]) -> None:
    """Logs a run that has measured something.

    Args:
        run: what `results.json` holds.
        folder: receives the offline run, or CSV files without W&B.
        files: written ones, by the kind they are recorded as.
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
