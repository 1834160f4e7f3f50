"""The tables that a fit prints: for each layer the ranges of keys and values and the errors of compressing them, and for each
group of layers the error of its dictionary."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from calib.layer_groups.grouping import in_words
from calib.statistics.heldout_error import SETTINGS

SHORT = {"calibrated": "calibr."}
WIDTH = 120  # more than the table needs; in a narrower terminal lines wrap and no figure is cut


def shown_bits(bits: Sequence[int]) -> list[int]:
    """Returns the bit widths shown: those of 4 and 2 that were measured; if neither was, the widest and the narrowest."""
    return [width for width in (4, 2) if width in bits] or sorted({max(bits), min(bits)}, reverse=True)


def print_table(metrics: Mapping[str, Any], bits: Sequence[int]) -> None:
    """Prints the figures of `fit_metrics` by layer, at the bit widths that `shown_bits` chooses of `bits`."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left"
    )
    table.title = "Keys and values by layer; relative error of the attention output on held-out text"
    for heading in ("layer", "keys", "outlier", "tail", "values", "outlier", "tail"):
        table.add_column(heading, justify="right", no_wrap=True)
    errors = [f"error_{width}bit_{setting}" for width in shown_bits(bits) for setting in SETTINGS]
    for name in errors:
        _, width, setting = name.split("_")
        heading = f"{width.removesuffix('bit')} bit\n{SHORT.get(setting, setting)}"
        table.add_column(heading, justify="right", no_wrap=True)
    for row in metrics["layers"]:
        cells = [str(row["layer"])]
        for stream in ("keys", "values"):
            cells.append(f"{row[f'{stream}_low']:.1f} {row[f'{stream}_high']:.1f}")
            cells.extend((f"{row[f'{stream}_outlier']:.1f}", f"{row[f'{stream}_tail']:.1f}"))
        table.add_row(*cells, *(f"{row[name]:.3f}" for name in errors))
    table.add_section()
    table.add_row("all", *[""] * 6, *(f"{metrics['overall'][name]:.3f}" for name in errors))
    table.caption = (
        "outlier: widest channel / median channel; tail: largest / 99.9th percentile;\n"
        "prompt: ranges of the running text; clipped: the same with calibrated clip;\n"
        "calibr.: calibrated key ranges (no parameters stored), value scales and clip"
    )
    wide(Console()).print(table)


def print_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Prints one line for each group of layers that share a dictionary, from `Dictionaries.groups`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = "Dictionaries by group of layers; held-out squared error"
    for heading in ("group", "layers", "vectors", "atoms", "k-means", "trained", "epochs", "dead"):
        table.add_column(heading, justify="left" if heading in ("group", "layers") else "right", no_wrap=True)
    for before, row in zip((None, *groups), groups, strict=False):
        if before and before["stream"] != row["stream"]:
            table.add_section()
        losses = (f"{row[name]:.4f}" for name in ("initial_loss", "loss"))
        counts = (str(row[name]) for name in ("epochs", "dead"))
        name = f"{row['stream']}.{row['group']}"
        table.add_row(name, in_words(row["layers"]), str(row["samples"]), str(row["atoms"]), *losses, *counts)
    wide(Console()).print(table)


def wide(console: Console) -> Console:
    """Returns `console` if it is wide enough for the tables, else a console of `WIDTH` columns."""
    return console if console.width >= WIDTH else Console(width=WIDTH)
