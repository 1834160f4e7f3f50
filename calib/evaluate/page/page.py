"""The report of a run as one HTML file, made only from the content of its `results.json`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calib.artifact_view.tables import inline
from calib.evaluate.cache_size import is_encoded
from calib.evaluate.figures import interval
from calib.evaluate.page.memory_bars import looks, memory_bars
from calib.evaluate.page.overview import SORTING, figures, figures_of, overview
from calib.evaluate.page.part_map import part_maps
from calib.evaluate.page.scatter import Point, scatter
from calib.evaluate.page.style import STYLE
from calib.evaluate.run_file import Row, Run, reused, rows
from calib.html_page.document import document
from calib.html_page.table import Table, section, words

ABOUT = (
    "Bits are true bits per value: everything that the cache holds on the device is counted. Square brackets have 95 % confidence "
    "intervals."
)
TOLD = ("task", "title", "measures")  # entries of a column that are shown separately from its settings


@dataclass(frozen=True)
class Drawn:
    """An additional part of the page that the caller provides: its lines of HTML (`body`), and their CSS (`style`)."""

    style: str
    body: Sequence[str]


def page(run: Run, command: str, further: Sequence[Table] = (), drawn: Drawn | None = None) -> str:
    """Returns the HTML page of a checked run.

    Args:
        run: the content of `results.json`; all texts in it are escaped.
        command: the command line.
        further: tables after those of the run itself.
        drawn: an additional part after the columns.
    """
    title = words(f"calib eval: {run['config'].get('name', '')}")
    found, columns = rows(run), run["columns"]
    look = looks(found)
    body = [
        f"<h1>{title}</h1>",
        f"<p>{words(subject(run))} {ABOUT}</p>",
        *failures(run),
        "<h2>Methods</h2>",
        *overview(run),
        *(line for column in columns for line in of_column(found, column, look, column is columns[0])),
        *(() if drawn is None else drawn.body),
        *(line for table in further for line in section(table)),
        *section(provenance(run, command)),
    ]
    return document(title, STYLE if drawn is None else STYLE + drawn.style, body, SORTING)


def subject(run: Run) -> str:
    """Returns a sentence on the model and the settings."""
    config = run["config"]
    return (
        f"{config.get('model')} in {config.get('dtype')} on {config.get('device')}, seed {config.get('seed')}, "
        f"batch size {config.get('batch_size')}."
    )


def of_column(found: Sequence[Row], column: dict[str, Any], look: Mapping[str, str], first: bool) -> Iterator[str]:
    """Yields the section of one column: the scatter, maps of its parts, and its memory bars (open for the first column only)."""
    title = column["title"]
    yield f"<h2>{words(title)}</h2>"
    yield f"<p>{words(column['measures'])}; {words(settings(column, 'sha256'))}</p>"
    names = figures_of(found, title)
    if names:
        yield from scatter(points_of(found, title, names[0]), names[0], title)
    yield from part_maps(found, title)
    bars = list(memory_bars(found, title, look))
    if bars:
        yield f"<details{' open' if first else ''}><summary>Bits per value by kind of memory</summary>"
        yield from bars
        yield "</details>"


def points_of(found: Sequence[Row], title: str, name: str) -> list[Point]:
    """Returns a point for each method that has the figure `name` on a column."""
    known = {row.name: figures(row, title) for row in found}
    return [
        Point(
            row.name,
            row.cells[title]["sizes"]["bits_per_value"],
            known[row.name][name],
            interval(known[row.name], name),
            row.cells[title]["sizes"]["host_bytes"] > 0,
            is_encoded(row.cells[title]["sizes"]),
        )
        for row in found
        if name in known[row.name]
    ]


def settings(column: dict[str, Any], *but: str) -> str:
    """Returns a column's settings as text, without the entries of `TOLD` and `but`."""
    return ", ".join(f"{name} {inline(value)}" for name, value in column.items() if name not in (*TOLD, *but))


def failures(run: Run) -> Iterator[str]:
    """Yields a list of the failed cells; nothing if there are none."""
    failed = [cell for cell in run["cells"] if "error" in cell]
    if failed:
        yield "<h2>Failed cells</h2><ul>"
        for cell in failed:
            where = words(f"{cell['name']}, {cell['column']}")
            yield f'<li>{where}: <code class="failed">{words(cell["error"])}</code></li>'
        yield "</ul>"


def provenance(run: Run, command: str) -> Table:
    """Returns a table of everything needed to repeat the run."""
    model = run["model"]
    shape = {key: model[key] for key in ("layers", "heads", "kv_heads", "head_dim", "vocab_size") if key in model}
    weights = model.get("weights")
    lines = [
        ("command", command),
        ("model", f"{inline(model.get('architecture'))}, {inline(shape)}"),
        ("weights", inline(weights)),
        ("model config", inline(model.get("config_hash"))),
        *((str(key), inline(value)) for key, value in run["config"].items() if key not in ("name", "model")),
        ("versions", inline(run["versions"])),
        ("machine", inline(run.get("machine"))),
        *(("taken over", sentence) for sentence in reused(run["cells"])),
        *((f"column {column['title']}", f"{column.get('task')}, {settings(column)}") for column in run["columns"]),
    ]
    return Table("Provenance", ["", ""], [list(line) for line in lines])
