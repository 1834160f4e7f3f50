"""The same evaluation of several models: `models` of a configuration, and tables that compare the models."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from calib.config_messages import unknown
from calib.errors import UsageError
from calib.evaluate.entries import is_mapping
from calib.evaluate.figures import number, scalars, spoken
from calib.evaluate.request import Request
from calib.evaluate.run_file import Run, rows, titles
from calib.html_page.table import Table
from calib.markdown_page import code, plain, section
from calib.runtime.messages.printable import printable

KEYS = ("model", "artifact", "dtype")  # entries of the request that each model may set


def requests(content: Mapping[str, Any], name: str) -> dict[str, Request]:
    """Returns a request for each of `models` by the model's name, or one request under "" if there is no `models`.

    A model is a folder or hub name, or {name:, model:, artifact:, dtype:}; missing entries are those of the content. Raises
    UsageError if anything is wrong with one of the requests.
    """
    shared = {key: value for key, value in content.items() if key != "models"}
    if "models" not in content:
        return {"": Request.of(shared, name)}
    models = content["models"]
    if not isinstance(models, list) or not models:
        raise UsageError(
            f"'models' must be a list of folders, hub names or {{name:, model:, artifact:}}, got {printable(models)}"
        )
    found: dict[str, Request] = {}
    for position, item in enumerate(models):
        own = {"model": item} if isinstance(item, str) else item
        if not is_mapping(own) or not isinstance(own.get("model"), str):
            raise UsageError(
                f"models[{position}] must be a folder, a hub name or {{name:, model:, artifact:}}, got {printable(item)}"
            )
        for key in own:
            if key not in ("name", *KEYS):
                raise UsageError(unknown(f"models.{key}", [f"models.{known}" for known in ("name", *KEYS)]))
        label = str(own.get("name") or PurePath(own["model"]).name)
        if label in found or PurePath(label).name != label or label in ("", ".."):
            raise UsageError(
                f"models[{position}] is called {printable(label)}: give it a `name` of its own, fit for a folder"
            )
        found[label] = Request.of(shared | {key: own[key] for key in KEYS if key in own}, name)
    return found


def beside(runs: Mapping[str, Run]) -> list[Table]:
    """Returns a table for each column, with a line for each method: quality and bits per value of every model."""
    first = next(iter(runs.values()))
    found = []
    for title in titles(first):
        cells = {model: {row.name: row.cells.get(title) for row in rows(run)} for model, run in runs.items()}
        known = [cell["figures"] for own in cells.values() for cell in own.values() if cell and "figures" in cell]
        if not known:
            continue
        quality = scalars(known)[0]
        header = ["method", *(word for model in runs for word in (f"{model}: {spoken(quality)}", "bits"))]
        names: Sequence[str] = list(dict.fromkeys(name for own in cells.values() for name in own))
        lines = [[name, *(word for own in cells.values() for word in pair(own.get(name), quality))] for name in names]
        found.append(Table(f"{title}, by model", header, lines, by_layer=True))
    return found


def pair(cell: Mapping[str, Any] | None, quality: str) -> tuple[str, str]:
    """A cell's quality and bits per value as text; dashes for a missing cell, "failed" for one that failed."""
    if cell is None or "error" in cell:
        return ("-" if cell is None else "failed"), "-"
    value = cell["figures"].get(quality)
    return "-" if value is None else number(value), f"{cell['sizes']['bits_per_value']:.2f}"


def page(tables: Sequence[Table], folders: Mapping[str, Path], command: str) -> str:
    """Returns the tables as Markdown, with links to each model's own report."""
    lines = ["# calib eval, by model", "", code(command), ""]
    lines += [f"- {plain(name)}: [report]({quote(folder.name)}/report.md)" for name, folder in folders.items()]
    return "\n".join([*lines, "", *(part for table in tables for part in section(table))])
