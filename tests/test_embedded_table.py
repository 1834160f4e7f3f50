"""The figures in docs/results/embedded equal those of the run of every method on the embedded model."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = json.loads((ROOT / "benchmarks/results/embedded.json").read_text())
CELLS = {(cell["name"], cell["column"]): cell for cell in RUN["cells"]}
LINES = [
    [part.strip() for part in line.strip("|\n ").split("|")]
    for line in (ROOT / "docs/results/embedded/README.md").read_text().splitlines()
    if line.startswith("| `")
]


def agrees(printed, value):
    """Whether a printed number is `value` rounded to as many digits."""
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("parts", LINES, ids=lambda parts: parts[0].strip("`"))
def test_a_line_of_the_summary(parts):
    name, exact, perplexity, kl, bits, more = [*parts, *[""] * (6 - len(parts))]
    lines = CELLS[name.strip("`"), "60 lines"]
    answers, low, high = re.fullmatch(r"([\d.]+) \(([\d.]+)-([\d.]+)\)", exact).groups()
    found = [(answers, lines["figures"]["exact"]), (low, lines["figures"]["low"]), (high, lines["figures"]["high"])]
    found += [(bits, lines["sizes"]["bits_per_value"])]
    if more:
        found.append((more, lines["sizes"]["marginal_bits"]))
    if perplexity:
        found.append((perplexity, CELLS[name.strip("`"), "perplexity"]["figures"]["perplexity"]))
        found.append((kl, CELLS[name.strip("`"), "agreement"]["figures"]["kl"]))
    assert all(agrees(*pair) for pair in found), [pair for pair in found if not agrees(*pair)]


def test_the_run_is_whole():
    assert len(LINES) > 10 and RUN["config"]["limit"] is None
    assert not [cell["name"] for cell in RUN["cells"] if "error" in cell]
    table = (ROOT / "docs/results/embedded/table.md").read_text()
    for (name, title), cell in CELLS.items():
        assert re.search(rf"^\| {re.escape(name)} \|.*{cell['sizes']['bits_per_value']:.2f}", table, re.M), (
            name,
            title,
        )
