"""A made-up `results.json`: two columns, a grid of depths, a group of methods, a cell that failed."""

from copy import deepcopy
from typing import Any


def toy_run(**changes: Any) -> dict[str, Any]:
    """The content of the file; `changes` replace entries of its top level."""
    content = {
        "format": 1,
        "config": {"name": "toy", "model": "small", "limit": None, "artifact": None, "dtype": "float32"}
        | {"device": "cpu", "seed": 3, "batch_size": 2, "products": "model"},
        "model": {"architecture": "llama", "layers": 2, "config_hash": "c0ffee", "weights": {"float32": "beef"}},
        "versions": {"calib": "0.1.0", "torch": "2.13.0"},
        "machine": {"processor": "x86_64", "threads": 1},
        "columns": [
            {"title": "needle 64", "measures": "exact answers", "task": "needle", "cases": 20},
            {
                "title": "words",
                "measures": "perplexity",
                "task": "perplexity",
                "text": "words.txt",
                "sha256": "ab" * 32,
            },
        ],
        "cells": [
            *row("full", "Reference", 16.0, needle(1.0, 0.84, 1.0, (1.0, 1.0)), text(9.5, 9.0, 10.0)),
            *row("rtn-4", "Low bits", 4.5, needle(0.9, 0.7, 0.97, (1.0, 0.8)), text(9.75, 9.25, 10.25)),
            *row("rtn-2", "Low bits", 2.5, needle(0.4, 0.22, 0.61, (0.5, 0.25)), text(30.0, 28.0, 32.0)),
            *row("worse", "Low bits", 5.0, needle(0.5, 0.3, 0.7, (0.5, 0.5)), "MemoryError: no room"),
        ],
    }
    return deepcopy(content) | changes


def needle(exact: float, low: float, high: float, depths: tuple[float, float]) -> dict[str, float]:
    """Figures of a cell, as the task `needle` writes them."""
    parts = {f"exact at depth {position}": value for position, value in zip((0, 0.5), depths, strict=True)}
    return {"cases": 20, "exact": exact, "high": high, "log_probability": exact - 1.125, "low": low, **parts}


def text(perplexity: float, low: float, high: float) -> dict[str, float]:
    """Figures of a cell, as the task `perplexity` writes them."""
    return {"perplexity": perplexity, "low": low, "high": high, "tokens": 640}


def row(name: str, group: str, bits: float, *results: dict[str, float] | str) -> list[dict[str, Any]]:
    """A method's cells, one for each column; a result that is a string is the error of a failed cell."""
    own = {
        "name": name,
        "group": group,
        "method": name.split("-")[0],
        "options": {"bits": int(bits)},
        "artifact": False,
    }
    return [
        own | {"column": title} | ({"error": result} if isinstance(result, str) else cell(bits, result))
        for title, result in zip(("needle 64", "words"), results, strict=True)
    ]


def cell(bits: float, figures: dict[str, float]) -> dict[str, Any]:
    """A measured cell of 1,000 values: a quarter of its bytes are low-rank factors; at 5 bits as many bytes are in host memory."""
    measured = int(125 * bits)
    sizes = {
        "bits_per_value": bits,
        "measured_bytes": measured,
        "predicted_bytes": measured,
        "host_bytes": measured if bits == 5 else 0,
        "paper_counting": None if bits > 4.9 else bits - 0.5,
        "by_kind": {"codes": measured * 3 // 4, "low_rank": measured - measured * 3 // 4},
    }
    return {"figures": figures, "sizes": sizes, "seconds": 1.0}
