"""The results of an evaluation as JSON (`results.json`) and as Markdown (`report.md`)."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from calib.capture.model_files import model_name
from calib.evaluate.cache_size import is_encoded
from calib.evaluate.cell import Cell, Result
from calib.evaluate.evaluation import Evaluation
from calib.evaluate.run_file import FORMAT, reused
from calib.evaluate.tasks import Column
from calib.evaluate.unsolved import marked, note, unsolved
from calib.html_page.table import Table
from calib.markdown_page import code, heading, line, plain, section

FAILED = "failed"
INTERVAL = "Square brackets have 95 % confidence intervals."
COUNTING = (
    "Bits are true bits per value: all bits that the cache holds on the device at the end (codes, parameters, positions, "
    "exact tokens, pages with their empty slots, tables), divided by the number of key and value elements of the tokens seen. "
    "Host memory is not included; `host bytes` has it. `paper counting`: bits per value by the formula of the method's paper "
    "(`runtime/methods/paper_counting.py`). `marginal bits`: bits per value that one more token would take. "
    "`share of DynamicCache`: relative to the bytes that transformers' `DynamicCache` takes for the same tokens in the model's "
    "dtype, without padding. `predicted bytes`: computed from shapes alone."
)
NOT_ENCODED = (
    "\\* nothing is encoded yet: every token is still exact in the window. This size does not show what the method saves (use "
    "longer prompts or a shorter window), and the cell is on no Pareto front."
)


def document(evaluation: Evaluation, results: Mapping[str, Result]) -> dict[str, Any]:
    """Returns all results as plain JSON. The same request on the same machine gives the same content, except `seconds`."""
    request = evaluation.request
    return {
        "format": FORMAT,
        "config": {
            "name": request.name,
            "model": model_name(request.model),
            "limit": request.limit,
            "artifact": next((cell.artifact_hash for cell in evaluation.cells if cell.artifact_hash), None),
            **{key: evaluation.base[key] for key in ("dtype", "device", "seed", "batch_size")},
            "products": request.products,
        },
        "model": {
            **evaluation.given.identity,
            "tokenizer": evaluation.tokenizer,
            "special_tokens": evaluation.special_tokens,
        },
        "versions": {**evaluation.base["versions"], "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "columns": [
            {"title": column.title, "measures": column.measure_name, **chance(column), **column.settings}
            for column in evaluation.columns
        ],
        "cells": [
            {
                "name": cell.entry.label,
                "group": cell.entry.group,
                "method": cell.entry.method,
                "options": cell.options(),
                "artifact": cell.artifact_hash is not None,
                "column": cell.column.title,
                **({"packages": cell.entry.packages} if cell.entry.packages else {}),
                **results[evaluation.key(cell)],
            }
            for cell in evaluation.cells
            if evaluation.key(cell) in results
        ],
    }


def chance(column: Column) -> dict[str, float]:
    """Returns {"chance": share of exact answers that guessing gives}, or {} if the column has no `chance` above 0."""
    share = float(getattr(column, "chance", 0.0))
    return {"chance": share} if share else {}


def as_json(content: Mapping[str, Any]) -> str:
    """Returns the document as JSON text."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def markdown(evaluation: Evaluation, results: Mapping[str, Result], command: str, further: Sequence[Table] = ()) -> str:
    """Returns the Markdown report: what was run, the table of methods by columns, a table with sizes for each column, failures,
    and the tables of `further`."""
    columns, nothing = evaluation.columns, unsolved(document(evaluation, results))
    lines = [f"# calib eval: {plain(evaluation.request.name)}", "", code(command), "", *about(evaluation, results), ""]
    lines += ["## Methods", "", *overview(evaluation, results, nothing), ""]
    lines += [line for title, why in nothing.items() for line in (plain(note(title, why)), "")]
    lines += [] if all(is_encoded(result["sizes"]) for result in measured(results)) else [NOT_ENCODED, ""]
    for column in columns:
        lines += [f"## {plain(column.title)}", "", *details(evaluation, results, column), ""]
    failures = [
        f"- {plain(cell.entry.label)}, {plain(cell.column.title)}: {plain(results[evaluation.key(cell)]['error'])}"
        for cell in failed(evaluation, results)
    ]
    lines += ["## Failed cells", "", *failures, ""] if failures else []
    for table in further:
        lines += section(table)
    return "\n".join(lines)


def about(evaluation: Evaluation, results: Mapping[str, Result]) -> Iterator[str]:
    """Yields lines that describe the model, the settings and the columns."""
    base, versions = evaluation.base, evaluation.base["versions"]
    products = (
        ""
        if evaluation.request.products == "model"
        else ", products of linear layers computed in float32 and rounded once"
    )
    yield (
        f"{plain(model_name(evaluation.request.model))} in {base['dtype']} on {base['device']}, seed {base['seed']}, "
        f"batch size {base['batch_size']}{products}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + ". All figures on this page were written by this command."
    )
    yield ""
    for column in evaluation.columns:
        details = ", ".join(
            f"{name} {value}" for name, value in column.settings.items() if name not in ("task", "sha256")
        )
        yield f"- **{plain(': '.join(names(column)))}**; {plain(details)}; {column.length:.0f} tokens per sequence in the cache"
    yield ""
    yield f"{INTERVAL} {COUNTING}"
    yield from (f"\n{plain(sentence)}" for sentence in reused(results.values()))


def measured(results: Mapping[str, Result]) -> list[Result]:
    """Returns the results of the cells that did not fail."""
    return [result for result in results.values() if "error" not in result]


def failed(evaluation: Evaluation, results: Mapping[str, Result]) -> list[Cell]:
    """The cells that failed, in order."""
    return [cell for cell in evaluation.cells if "error" in results.get(evaluation.key(cell), {})]


def rows(evaluation: Evaluation, results: Mapping[str, Result]) -> Iterator[tuple[str, str, list[tuple[Cell, Result]]]]:
    """Yields (group, label, its cells with their results) for every row that has a result."""
    for entry in evaluation.entries:
        cells = [cell for cell in evaluation.cells if cell.entry is entry]
        found = [(cell, results[evaluation.key(cell)]) for cell in cells if evaluation.key(cell) in results]
        if found:
            yield entry.group, entry.label, found


def score(column: Column, result: Result | None) -> str:
    """Returns the cell's figures in words, "failed", or "" if there is no result."""
    if result is None:
        return ""
    return FAILED if "error" in result else column.words(result["figures"])


def bits(result: Result | None) -> str:
    """Returns "3.12 (2.61)": true bits per value, with a star if nothing is encoded, and in brackets the paper's counting if
    any."""
    if result is None or "error" in result:
        return ""
    counted = result["sizes"]["paper_counting"]
    true = f"{result['sizes']['bits_per_value']:.2f}{'' if is_encoded(result['sizes']) else '*'}"
    return true if counted is None else f"{true} ({counted:.2f})"


def names(column: Column) -> list[str]:
    """Returns a column's title, and the name of its measure if that differs."""
    return [column.title] if column.title == column.measure_name else [column.title, column.measure_name]


def overview(evaluation: Evaluation, results: Mapping[str, Result], nothing: dict[str, str]) -> Iterator[str]:
    """Yields the table of methods by columns; columns in `nothing` are marked as not solved by the full cache."""
    headings = ["method"]
    for column in evaluation.columns:
        headings += [marked(": ".join(names(column)), nothing, column.title), "bits (paper counting)"]
    yield from heading(headings)
    group = ""
    for name, label, cells in rows(evaluation, results):
        if name != group:
            yield line([name, *[""] * (len(headings) - 1)], bold=True)
            group = name
        found = {cell.column.title: result for cell, result in cells}
        parts = [label]
        for column in evaluation.columns:
            parts += [score(column, found.get(column.title)), bits(found.get(column.title))]
        yield line(parts)


def details(evaluation: Evaluation, results: Mapping[str, Result], column: Column) -> Iterator[str]:
    """Yields the table of one column, with all sizes of its cells."""
    sizes = [
        "bits per value",
        "paper counting",
        "marginal bits",
        "bytes",
        "share of DynamicCache",
        "predicted bytes",
        "host bytes",
        "seconds",
    ]
    yield from heading(["method", column.measure_name, *sizes])
    for _, label, cells in rows(evaluation, results):
        for _, result in (pair for pair in cells if pair[0].column is column):
            yield line([label, score(column, result), *weights(result)])


def weights(result: Result) -> list[str]:
    """Returns a cell's sizes as texts, all empty for a cell that failed."""
    if "error" in result:
        return [""] * 8
    size, star = result["sizes"], "" if is_encoded(result["sizes"]) else "*"
    counted, dynamic = size["paper_counting"], size.get("dynamic_bytes")
    return [
        f"{size['bits_per_value']:.2f}{star}",
        "" if counted is None else f"{counted:.2f}",
        "" if size["marginal_bits"] is None else f"{size['marginal_bits']:.2f}",
        f"{size['measured_bytes']:,}",
        "" if dynamic is None else f"{size['share_of_dynamic']:.1%} of {dynamic:,}",
        "" if size["predicted_bytes"] is None else f"{size['predicted_bytes']:,}",
        f"{size['host_bytes']:,}" if size["host_bytes"] else "",
        f"{result['seconds']:.1f}",
    ]
