"""HTML page of a tuned method: chart of predicted loss against true bits, for tuned layers and for one setting in all layers."""

from collections.abc import Mapping, Sequence

from calib.evaluate.page.scatter import Point, scatter
from calib.evaluate.page.style import STYLE
from calib.html_page.document import document
from calib.html_page.table import Table, section, words
from calib.tune.result import Search, Setting
from calib.tune.tables import options

ABOUT = (
    "Bits are true bits per value of the encoded tokens, with parameters, indices and positions. Loss is e^T W e of a token's "
    "errors e, with the sensitivities W that the fit has measured, summed over layers, keys and values: losing all keys "
    "and values has a loss of about 1."
)


def page(
    search: Search, settings: Mapping[float, Setting], front: Sequence[Setting], tables: Sequence[Table], command: str
) -> str:
    """Returns the HTML page; all texts are escaped."""
    title = words(f"calib tune: {search.method}")
    body = [
        f"<h1>{title}</h1>",
        f"<p>{words(ABOUT)}</p>",
        *scatter(points(search, settings, front), "loss", search.method),
        *(line for table in tables for line in section(table)),
        *section(Table("Command", ["", ""], [["command", command]])),
    ]
    return document(title, STYLE, body)


def points(search: Search, settings: Mapping[float, Setting], front: Sequence[Setting]) -> list[Point]:
    """Returns points for the chosen settings, for the front, and for the Pareto-optimal settings that are equal in all layers."""
    own = [Point(f"tuned, {budget:g}", one.mean_bits, one.loss, None) for budget, one in settings.items()]
    tuned = [Point("tuned", one.mean_bits, one.loss, None) for one in front]
    singles: list[Setting] = []
    for one in sorted(search.uniforms(), key=lambda one: (one.mean_bits, one.loss)):
        if not singles or one.loss < singles[-1].loss:
            singles.append(one)
    named = [
        Point(options({**one.chosen[0].options, **one.chosen[0].own}), one.mean_bits, one.loss, None) for one in singles
    ]
    return own + tuned + named
