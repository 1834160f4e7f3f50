"""The short table of docs/results/smollm2: a row for each method that the run has finished.

    python benchmarks/smollm2_summary.py

Reads `benchmarks/results/smollm2.json` (`make smollm2-table`) alone and writes between the page's markers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUN = Path(__file__).parent / "results/smollm2.json"
PAGE = Path(__file__).parent.parent / "docs/results/smollm2/README.md"
MARKERS = "<!-- table -->", "<!-- end of table -->"
TEXTS = ("Wikipedia", "code", "stories")
KL = tuple(f"KL, {text}" for text in TEXTS)
HEAD = ("method", "20 lines", "log p", "perplexity", *KL, "same token", "bits, true", "of one more token")


def rows(run: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, in the order of the run."""
    methods: dict[str, dict[str, dict[str, Any]]] = {}
    groups: dict[str, str] = {}
    for cell in run["cells"]:
        methods.setdefault(cell["name"], {})[cell["column"]] = cell
        groups[cell["name"]] = cell["group"]
    shown = ""
    columns = {"20 lines", "perplexity", *(f"agreement on {text}" for text in TEXTS)}
    for name, cells in methods.items():
        if not columns <= cells.keys():
            continue
        if groups[name] != shown:
            shown = groups[name]
            yield (f"**{shown}**", *[""] * (len(HEAD) - 1))
        lines, text = cells["20 lines"]["figures"], cells["perplexity"]["figures"]
        agreement = [cells[f"agreement on {text}"]["figures"] for text in TEXTS]
        sizes = cells["perplexity"]["sizes"]
        marginal = sizes["marginal_bits"]
        yield (
            f"`{name}`",
            f"{lines['exact']:.3f} ({lines['low']:.2f}-{lines['high']:.2f})",
            f"{lines['log_probability']:.2f}",
            f"{text['perplexity']:.2f}",
            *(f"{one['kl']:.4f}" for one in agreement),
            f"{agreement[0]['agreement']:.3f}",
            f"{sizes['bits_per_value']:.2f}",
            "" if marginal is None else f"{marginal:.2f}",
        )


def page(text: str, run: dict[str, Any]) -> str:
    """`text` with the run's table between its markers."""
    before, rest = text.split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    table = [HEAD, ("---",) * len(HEAD), *rows(run)]
    written = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"{before}{MARKERS[0]}\n{written}\n{MARKERS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(RUN.read_text())))
    print(PAGE)
