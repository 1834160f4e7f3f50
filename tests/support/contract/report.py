"""The table of cells as Markdown: for each architecture methods x modes, for each 16-bit dtype methods x architectures."""

import math
import platform
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from contract.architectures import ARCHITECTURES
from contract.cell import SHARE, SHARE_OF_PIECES, Cell, allowed
from contract.matrix import CELLS, METHODS, SHORT
from contract.modes import MODES
from tolerances import FORWARD

COMMAND = "make contract"


@dataclass(frozen=True)
class CellReport:
    """A cell that ran: whether it passed, its entries, and its result if it has one."""

    passed: bool
    cell: dict[str, str]
    result: dict[str, Any] | None

    def __str__(self) -> str:
        if not self.passed or self.result is None:
            return "**failed**"
        share = "" if self.cell["method"] == "full" else f" · {self.result['share']:.0%}"
        return f"{self.result['worst']:.0e}{share}{' · tie' if self.result['tie'] else ''}"


def report(cells: list[CellReport]) -> str:
    """The report as Markdown; cells that did not run are empty and counted."""
    parts = ["# The cache contract", introduction(cells)]
    for architecture in ARCHITECTURES:
        query, kv, head_dim = architecture.heads
        heads = f"{query} query heads and {kv} KV head{'s' * (kv > 1)} of {head_dim} channels"
        parts.append(f"## {architecture}\n\n{architecture.family}, {heads}.")
        own = [seen for seen in cells if seen.cell["architecture"] == architecture.name]
        parts.append(table("mode", list(MODES), [seen for seen in own if seen.cell["dtype"] == "float32"]))
    for dtype in (str(dtype).removeprefix("torch.") for dtype in SHORT):
        parts.append(f"## {dtype}, greedy ragged")
        names = [architecture.name for architecture in ARCHITECTURES]
        parts.append(table("architecture", names, [seen for seen in cells if seen.cell["dtype"] == dtype]))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
Every way of generating (mode), with every method, on every architecture: random weights, two layers, sequences of about 500 to
650 tokens. `full` is compared with `DynamicCache`. Every other method is compared, at every forward, with a float64 model
whose attention uses the keys and values that the cache's pages decode to; both have to generate the same tokens. (If all layers
have a sliding window, `DynamicCache` counts the padding between turns as part of the window, so there `full` is compared with the
float64 model as well.) At the end every sequence must hold its own tokens and no others, with the codes that they get when
encoded alone and at once. Methods that choose tokens by their attention must hold no tokens but those of the sequence, each once,
encoded as by their tier.

A cell of the tables has the largest difference of a logit relative to the largest logit, and the measured bytes (without tables
that belong to the method itself) relative to 16 bits per value for the same tokens. `tie`: the two runs generated different tokens
after a choice between tokens whose logits differ by less than the tolerance."""


def introduction(cells: list[CellReport]) -> str:
    """The introduction: the meaning of a cell, totals, versions."""
    passed = [seen.result for seen in cells if seen.passed and seen.result]
    shares = [seen.result["share"] for seen in cells if seen.result and limited(seen.cell)]
    tried, accepted = (sum(result["drafts"][part] for result in passed) for part in (0, 1))
    lines = [
        f"- {len(passed)} of {len(CELLS)} cells passed, {len(cells) - len(passed)} failed, "
        f"{len(CELLS) - len(cells)} did not run; {sum(result['tie'] for result in passed)} ties.",
        f"- {sum(result['forwards'] for result in passed)} forwards compared; of {tried} drafts {accepted} were accepted.",
        *(f"- {worst(cells, dtype)}" for dtype in FORWARD),
        f"- Largest cache of a compressed cell: {max(shares, default=0):.1%} of 16 bits. Allowed are {SHARE:.0%}, and "
        f"{SHARE_OF_PIECES:.0%} for a corrected method whose prompt comes in chunks, each with low-rank factors of its own. "
        "There is no limit for snapkv with a prompt in chunks, because it keeps all chunks but the first exact.",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}.",
        f"- Written by `{COMMAND}`.",
    ]
    return f"{INTRODUCTION}\n\n" + "\n".join(lines)


def limited(cell: dict[str, str]) -> bool:
    """Whether the contract limits the bytes of a cell."""
    return cell["method"] != "full" and math.isfinite(allowed(Cell(cell["method"], cell["mode"], cell["architecture"])))


def worst(cells: list[CellReport], dtype: torch.dtype) -> str:
    """A line with the largest difference in models of this dtype, and the tolerance."""
    name = str(dtype).removeprefix("torch.")
    found = [seen.result["worst"] for seen in cells if seen.result and seen.cell["dtype"] == name]
    return f"Largest difference in {name}: {max(found, default=0):.1e}, allowed {FORWARD[dtype]:.1e}."


def table(entry: str, rows: list[str], cells: list[CellReport]) -> str:
    """A Markdown table of cells: rows are the values `rows` of `entry`, columns are methods."""
    found = {(seen.cell[entry], seen.cell["method"]): str(seen) for seen in cells}
    lines = [f"| {entry} | {' | '.join(METHODS)} |", f"|---|{'---|' * len(METHODS)}"]
    lines += [f"| {row} | {' | '.join(found.get((row, method), '') for method in METHODS)} |" for row in rows]
    return "\n".join(lines)
