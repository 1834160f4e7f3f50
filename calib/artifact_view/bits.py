"""The bit allocation of `klt`: a table of layers at several budgets, and a drawing of the components at one budget."""

from collections.abc import Iterator

import torch
from torch import Tensor

from calib.html_page.table import Table
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import MOST_BITS, ROLES, Allocation, Allocator
from calib.runtime.artifact.components import allocator, coding_of, has_losses, loss_at

BUDGETS = (4.0, 2.0, 1.0)
DRAWN = 2.0  # budget of the drawing in bits per value, if heads can be coded with so few
CELL, ROW, LETTER = 6, 14, 11  # width of a square, height of a row and of letters, in SVG units


def has_bits(artifact: Artifact) -> bool:
    """Returns whether `klt` could use the artifact: it has components of keys and values, and heads are large enough."""
    coding = coding_of(artifact)
    if not all(artifact.has(coding.name(role, "errors")) for role in ROLES):
        return False
    try:
        return bool(allocator(artifact))
    except ValueError:
        return False


def drawn(budgets: Allocator) -> float:
    """Returns the budget of the drawing; heads of few channels need more than `DRAWN` bits per value."""
    return max(DRAWN, budgets.least_bits)


def bits_table(artifact: Artifact) -> Table:
    """Returns a table of bits per value of each layer's keys and values at each budget, and the expected loss in nats."""
    budgets = allocator(artifact)
    shown = drawn(budgets)
    told = sorted({shown, *(bits for bits in BUDGETS if bits >= budgets.least_bits)}, reverse=True)
    found = [budgets.at_bits(bits) for bits in told]
    header = ["", *(f"{role} at {bits:g}" for bits in told for role in ROLES), f"fields at {shown:g}"]
    layers = len(found[0].streams["keys"])
    rows = []
    for layer in range(layers):
        spent = [f"{mean_bits(artifact, one, role, layer):.2f}" for one in found for role in ROLES]
        fields = (found[told.index(shown)].streams[role][layer].widths for role in ROLES)
        rows.append([f"layer {layer}", *spent, " / ".join("+".join(map(str, widths)) for widths in fields)])
    if has_losses(artifact):
        losses = [part for one in found for part in (f"{loss_at(artifact, one.error):.2g}", "")]
        rows.append(["nats", *losses, ""])
    return Table("bits of klt by layer", header, rows, by_layer=True)


def mean_bits(artifact: Artifact, allocation: Allocation, role: str, layer: int) -> float:
    """Returns the bits per value of a layer's keys or values."""
    heads, channels = artifact.tensor("values.klt.mean").shape[1:]
    return 16 * sum(allocation.streams[role][layer].counts) / (heads * channels)


def bits_map(artifact: Artifact) -> str:
    """Returns the drawing as SVG: a row for each layer's keys and for its values, with a square for each component.

    Components are in the artifact's order, most variance first; the colour is the mean bits of the layer's heads, full at 8.
    """
    shown = drawn(allocator(artifact))
    allocation = allocator(artifact).at_bits(shown)
    layers, _, channels = artifact.tensor("values.klt.mean").shape
    margin = 5 * LETTER
    width, height = margin + channels * CELL, 2 * layers * ROW
    return "\n".join(
        [
            f'<svg class="map" viewBox="0 0 {width} {height}" style="max-width:40rem;font-size:{LETTER}px" role="img" '
            f'aria-label="Bits of the components of each layer at {shown:g} bits a value">',
            *(line for layer in range(layers) for line in _layer(allocation, layer, channels, margin)),
            "</svg>",
        ]
    )


def _layer(allocation: Allocation, layer: int, channels: int, margin: int) -> Iterator[str]:
    for position, role in enumerate(ROLES):
        y = (2 * layer + position) * ROW
        yield f'<text class="axis" x="{margin - 4}" y="{y + LETTER}" text-anchor="end">{role[0]} {layer}</text>'
        for component, bits in enumerate(_bits(allocation, role, layer, channels).tolist()):
            x = margin + component * CELL
            yield (
                f'<rect class="bits" x="{x}" y="{y}" width="{CELL - 1}" height="{ROW - 1}" fill-opacity="{bits / MOST_BITS:.3f}">'
                f"<title>layer {layer}, {role}, component {component}: {bits:.2f} bits</title></rect>"
            )


def _bits(allocation: Allocation, role: str, layer: int, channels: int) -> Tensor:
    """Returns the bits of each component, the mean of the layer's heads: float64 `[channels]`."""
    words = allocation.streams[role][layer]
    of_heads = [(words.bits_of(head) + [0] * channels)[:channels] for head in range(len(words.counts))]
    return torch.tensor(of_heads, dtype=torch.float64).mean(0)
