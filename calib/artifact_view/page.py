"""The page of an artifact: one HTML file without scripts that loads nothing from the network."""

from collections.abc import Iterator
from pathlib import Path

from calib.artifact_view.bits import bits_map, drawn, has_bits
from calib.artifact_view.groups import Group, groups
from calib.artifact_view.heat_map import heat_map
from calib.artifact_view.loss_bars import loss_bars
from calib.artifact_view.style import STYLE
from calib.artifact_view.tables import tables
from calib.html_page.document import document
from calib.html_page.table import section, words
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.components import allocator
from calib.runtime.artifact.tensor_registry import STREAMS


def page(artifact: Artifact, path: Path) -> str:
    """Returns the page for the artifact in the file `path`: tables, heat maps of divergences, bits of components, loss bars.

    All text from the file is escaped, and a content security policy forbids the browser to load anything.
    """
    first, *rest = tables(artifact, path)
    title = words(path.name)
    body = [
        f"<h1>{title}</h1>",
        *section(first, titled=False),
        *drawings(artifact, groups(artifact)),
        *(line for table in rest for line in section(table)),
    ]
    return document(title, STYLE, body)


def drawings(artifact: Artifact, found: list[Group]) -> Iterator[str]:
    """Yields divergences by stream, bits of components and losses, as far as the artifact has them."""
    for stream in STREAMS:
        if artifact.has(f"{stream}.divergence"):
            layers = [group.layers for group in found if group.stream == stream]
            yield f"<h2>How far apart the {stream} of two layers lie</h2>"
            yield (
                "<p>Jensen-Shannon divergence in nats: without colour 0, full colour ln 2"
                f"{'; framed are the layers that share a dictionary' if layers else ''}.</p>"
            )
            yield heat_map(artifact.tensor(f"{stream}.divergence"), layers, stream)
    if has_bits(artifact):
        yield "<h2>Where klt spends its bits</h2>"
        yield (
            f"<p>Bits of the components of each layer's keys (k) and values (v) at {drawn(allocator(artifact)):g} bits a "
            "value, the mean of the heads; full colour is 8.</p>"
        )
        yield bits_map(artifact)
    if any(group.figures for group in found):
        yield "<h2>Loss of the dictionaries: k-means and after training</h2>"
        yield "<p>Mean of |x - x^|<sup>2</sup> / |x|<sup>2</sup> on held-out vectors, by group of layers.</p>"
        yield loss_bars(found)
