"""Tables of the choices, for the terminal, the page and the logger."""

from collections.abc import Mapping
from typing import Any

from calib.evaluate.figures import number
from calib.html_page.table import Table
from calib.runtime.methods.tuned import Choice


def budget_table(choices: list[Choice]) -> Table:
    """Returns a table with a line for each budget: its bits and predicted loss, and the best setting equal in all layers."""
    header = ["budget", "bits", "loss", "one setting", "its bits", "its loss"]
    rows = []
    for choice in choices:
        found, one = choice.predicted, choice.predicted["uniform"]
        own = [f"{choice.budget:g}", f"{found['bits']:.3f}", number(found["loss"])]
        rows.append(
            own
            + (
                ["none", "", ""]
                if one is None
                else [options(one["options"]), f"{one['bits']:.3f}", number(one["loss"])]
            )
        )
    return Table(f"{choices[0].method}: loss by budget", header, rows)


def layer_table(choice: Choice) -> Table:
    """Returns a table with a line for each layer; the options that all layers share are in its title."""
    shared = options(choice.options)
    rows = [
        [str(layer), options(own), f"{found['bits']:.3f}", number(found["loss"])]
        for layer, (own, found) in enumerate(zip(choice.layers, choice.predicted["layers"], strict=True))
        if own is not None
    ]
    return Table(
        f"{choice.method} at {choice.budget:g} bits" + (f", every layer: {shared}" if shared else ""),
        ["layer", "options", "bits", "loss"],
        rows,
    )


def options(of: Mapping[str, Any]) -> str:
    """Formats options as "bits=2 group=64"."""
    return " ".join(f"{name}={value(part)}" for name, part in of.items())


def value(part: Any) -> str:
    """Formats one option's value; pairs such as tiers become 4:0.6/2:0.4."""
    if isinstance(part, list | tuple):
        return "/".join(":".join(map(str, inner)) if isinstance(inner, list | tuple) else str(inner) for inner in part)
    return "default" if part is None else str(part)
