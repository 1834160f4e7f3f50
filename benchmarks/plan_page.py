"""The parts of docs/plan.md that `plan_cpu` and `run_plan_cpu` write: tables and the output of `--plan`, between two comments."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/plan.md"
PASSIVE = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # as `calib.cli` sets it


def printed(words: list[str], threads: int) -> list[str]:
    """Returns the lines that the command of `calib` prints on this many threads, as a code block."""
    run = f"import torch; torch.set_num_threads({threads}); from calib.cli import main; main({words!r})"
    found = subprocess.run(
        [sys.executable, "-c", run], check=True, capture_output=True, text=True, env=PASSIVE, cwd=ROOT
    )
    return ["```", *found.stdout.rstrip().splitlines(), "```"]


def rewrite(mark: str, rows: list[str]) -> None:
    """Replaces the text between `<!-- mark -->` and `<!-- end of mark -->` on the page by `rows`."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {mark} -->")
    _, end, after = rest.partition(f"<!-- end of {mark} -->")
    PAGE.write_text("".join([before, begin, "\n".join(["", *rows, ""]), end, after]))
