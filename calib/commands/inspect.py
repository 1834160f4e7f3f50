"""`calib inspect ARTIFACT [--json]`: what an artifact holds, for a person or for a program.

The file passes every check of `Artifact.load` first, so what is shown is what a method would get.
"""

import hashlib
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.arguments import Parser
from calib.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from calib.runtime.artifact import Artifact

WIDTH = 80  # columns of the narrowest terminal the tables are made for


def run(argv: Sequence[str]) -> int:
    """Prints the artifact named in `argv`; raises `UsageError` for a wrong request, `ArtifactError` for a bad file."""
    parser = Parser(prog="calib inspect", description="Show what an artifact of `calib fit` holds, after checking it.")
    parser.add_argument("artifact", metavar="ARTIFACT", help="the .calib.safetensors file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    asked = parser.parse_args(argv)
    if not os.path.isfile(asked.artifact):
        found = "is a folder" if os.path.isdir(asked.artifact) else "does not exist"
        raise UsageError(f"{asked.artifact} {found}, expected an artifact file; `calib fit` writes one")

    from calib.runtime.artifact import Artifact

    artifact = Artifact.load(asked.artifact)
    if asked.json:
        print(json.dumps(as_json(artifact, Path(asked.artifact)), indent=2, sort_keys=True, allow_nan=False))
    else:
        show(artifact, Path(asked.artifact))
    return 0


def as_json(artifact: "Artifact", path: Path) -> dict[str, Any]:
    """Everything but the tensors' entries: each has its dtype, shape, least, median and greatest value instead."""
    from calib.runtime.artifact_file import FORMAT_VERSION

    return {
        "file": {
            "name": path.name,
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
        "format_version": FORMAT_VERSION,
        "fingerprint": artifact.fingerprint,
        "provenance": artifact.provenance,
        "clip_bits": list(artifact.clip_bits),
        "tensors": {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), **spread(tensor)}
            for name, tensor in artifact.tensors.items()
        },
    }


def spread(tensor: "Tensor") -> dict[str, float | None]:
    """Least, median (the lower one of two) and greatest entry; None for a tensor without entries."""
    if tensor.numel() == 0:
        return {"min": None, "median": None, "max": None}
    entries = tensor.double().flatten()
    return {"min": entries.min().item(), "median": entries.median().item(), "max": entries.max().item()}


def show(artifact: "Artifact", path: Path) -> None:
    """The tables a person reads: model, data, seed, versions, tensors, fit metrics by layer where there are any."""
    model, provenance = artifact.fingerprint, dict(artifact.provenance)
    metrics = provenance.pop("metrics", {})
    layers = metrics["layers"] if isinstance(metrics, dict) and is_table(metrics.get("layers")) else None
    if layers:
        metrics = {key: value for key, value in metrics.items() if key != "layers"}
    config = provenance.pop("config", None)
    summary = [
        ("file", f"{path.name}, {path.stat().st_size:,} bytes, every checksum right"),
        (
            "model",
            f"{model['architecture']}, {model['layers']} layers, {model['heads']} heads, {model['kv_heads']} KV heads, "
            f"head_dim {model['head_dim']}, vocabulary {model['vocab_size']}",
        ),
        ("rope", inline(model["rope"])),
        *((str(key), inline(provenance[key])) for key in ("data", "seed", "versions") if key in provenance),
        *((str(key), inline(value)) for key, value in provenance.items() if key not in ("data", "seed", "versions")),
        *([("metrics", inline(metrics))] if metrics else []),
        *([("config", "the resolved configuration: shown by --json")] if config is not None else []),
    ]
    table("artifact", ["", ""], [[key, value] for key, value in summary])
    rows = [
        [name, inline(list(tensor.shape)), *map(number, spread(tensor).values())]
        for name, tensor in artifact.tensors.items()
    ]
    bits = f", clip factors at {', '.join(map(str, artifact.clip_bits))} bits" if artifact.clip_bits else ""
    table(f"{len(rows)} tensors{bits}", ["tensor", "shape", "min", "median", "max"], rows)
    if layers:
        show_layers(layers)


def is_table(value: object) -> bool:
    """Whether a metric is a list of dicts of numbers, one for each layer."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, dict) and all(isinstance(cell, int | float) for cell in row.values()) for row in value)
    )


def show_layers(layers: Sequence[Mapping[str, float]]) -> None:
    """One row for each layer, in as many tables as keep within 80 columns; the layer's number leads each."""
    names = list(dict.fromkeys(name for row in layers for name in row if name != "layer"))
    columns = {name: [number(row.get(name)) for row in layers] for name in names}
    leading = [str(row.get("layer", index)) for index, row in enumerate(layers)]
    parts: list[list[str]] = [[]]
    room = WIDTH
    for name in names:
        width = 2 + max(map(len, [name, *columns[name]]))
        if parts[-1] and width > room:
            parts.append([])
        room = (room if parts[-1] else WIDTH - 2 - max(map(len, ["layer", *leading]))) - width
        parts[-1].append(name)
    for index, part in enumerate(parts):
        heading = "fit metrics by layer" + (f" ({index + 1} of {len(parts)})" if len(parts) > 1 else "")
        rows = [[layer, *(columns[name][row] for name in part)] for row, layer in enumerate(leading)]
        table(heading, ["layer", *part], rows)


def number(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def inline(value: object) -> str:
    """A JSON value on one line, without the quotes and braces of the outermost level."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inline(entry)}" for key, entry in sorted(value.items())) or "none"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints one table, with rich where it is installed. A header of empty names is not shown."""
    # Names and values come out of a file: a terminal's control characters in them must not reach the terminal.
    rows = [["".join(letter if letter.isprintable() else "?" for letter in cell) for cell in row] for row in rows]
    header = ["".join(letter if letter.isprintable() else "?" for letter in cell) for cell in header]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print_plain(title, header, rows)
        return
    drawn = Table(box=None, show_header=any(header), padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(header):
        drawn.add_column(Text(name), justify="left" if index == 0 or not any(header) else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console(file=sys.stdout)
    console.print(Text(title, style="bold"))
    console.print(drawn)
    console.print()


def print_plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same table in plain text: first column to the left, numbers to the right, a long last text folded."""
    named = any(header)
    widths = [max(map(len, column)) for column in zip(*([header] if named else []), *rows, strict=True)]
    print(title)
    for row in [header, *rows] if named else rows:
        if named:
            cells = [
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
            continue
        room = WIDTH - widths[0] - 2
        chunks = textwrap.wrap(row[1], room) or [""]
        for index, chunk in enumerate(chunks):
            print(f"{row[0] if index == 0 else '':<{widths[0]}}  {chunk}")
    print()
