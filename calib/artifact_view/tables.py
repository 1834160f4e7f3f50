"""The tables of an artifact: model, data, seed, versions; groups of layers; fit metrics and bits by layer; tensors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from calib.artifact_view.bits import bits_table, has_bits
from calib.artifact_view.groups import Group, groups, is_group, is_number
from calib.html_page.table import Table
from calib.layer_groups.grouping import in_words
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.tuned import choices

MOST_LINES = 64  # most provenance entries shown besides those that a fit writes
LONGEST = 4000  # most characters of a value; those of a fit have at most a tenth of it
MOST_COLUMNS, MOST_ROWS = 256, 4096  # largest table of layers shown; a fit of every form and width has half the columns


def tables(artifact: Artifact, path: Path) -> list[Table]:
    """Returns all tables of the artifact in the file `path`; names and values are not escaped."""
    metrics = artifact.provenance.get("metrics", {})
    layers = metrics["layers"] if isinstance(metrics, dict) and is_table(metrics.get("layers")) else None
    return [
        summary(artifact, path),
        *([group_table(found)] if (found := groups(artifact)) else []),
        *([layer_table(layers)] if layers else []),
        *([bits_table(artifact)] if has_bits(artifact) else []),
        tensor_table(artifact),
    ]


def summary(artifact: Artifact, path: Path) -> Table:
    """Returns the table of the file's own data: name, model, provenance, tuned options."""
    model, provenance = artifact.fingerprint, dict(artifact.provenance)
    metrics = provenance.pop("metrics", {})
    if isinstance(metrics, dict):
        apart = {
            "layers": is_table(metrics.get("layers")),
            "dictionaries": is_group_list(metrics.get("dictionaries")),
        }
        metrics = {key: value for key, value in metrics.items() if not apart.get(key)}
    config, _ = provenance.pop("config", None), provenance.pop("tuned", None)
    tuned = ", ".join(f"{choice.method} at {choice.budget:g} bits" for choice in choices(artifact))
    first = ("data", "seed", "versions")
    others = [(key, value) for key, value in provenance.items() if key not in first]
    rows = [
        ("file", f"{path.name}, {path.stat().st_size:,} bytes, every checksum right"),
        (
            "model",
            f"{model['architecture']}, {model['layers']} layers, {model['heads']} heads, {model['kv_heads']} KV heads, "
            f"head_dim {model['head_dim']}, vocabulary {model['vocab_size']}",
        ),
        ("rope", inline(model["rope"])),
        *((key, inline(provenance[key])) for key in first if key in provenance),
        *((str(key), inline(value)) for key, value in others[:MOST_LINES]),
        *([("", f"{len(others) - MOST_LINES} entries more: shown by --json")] if len(others) > MOST_LINES else []),
        *([("tuned", tuned)] if tuned else []),
        *([("metrics", inline(rounded(metrics)))] if metrics else []),
        *([("config", "the resolved configuration: shown by --json")] if config is not None else []),
    ]
    return Table("artifact", ["", ""], [(cut(name), cut(value)) for name, value in rows])


def group_table(found: Sequence[Group]) -> Table:
    """Returns the table of the groups of layers of both streams, with the errors of their dictionaries."""
    header = ["group", "layers", "atoms", "channels", "k-means", "trained", "epochs", "dead"]
    rows = [
        [
            group.name,
            in_words(group.layers),
            *map(number, (group.atoms, group.channels)),
            *(number(group.figures.get(name)) for name in ("initial_loss", "loss", "epochs", "dead")),
        ]
        for group in found
    ]
    return Table("groups of layers; relative squared error of their dictionaries", header, rows)


def layer_table(layers: Sequence[Mapping[str, float]]) -> Table:
    """Returns a table of the fit's metrics with one row for each layer."""
    names = list(dict.fromkeys(name for row in layers for name in row if name != "layer"))
    rows = [
        [str(row.get("layer", index)), *(number(row.get(name)) for name in names)] for index, row in enumerate(layers)
    ]
    return Table("fit metrics by layer", ["layer", *names], rows, by_layer=True)


def tensor_table(artifact: Artifact) -> Table:
    """Returns a table with one row for each tensor: shape, least, median and greatest entry."""
    rows = [
        [name, inline(list(tensor.shape)), *map(number, spread(tensor).values())]
        for name, tensor in artifact.tensors.items()
    ]
    bits = f", clip factors at {', '.join(map(str, artifact.clip_bits))} bits" if artifact.clip_bits else ""
    return Table(f"{len(rows)} tensors{bits}", ["tensor", "shape", "min", "median", "max"], rows)


def spread(tensor: Tensor) -> dict[str, float | None]:
    """Returns least, median (the lower one of two) and greatest entry; None for a tensor without entries."""
    if tensor.numel() == 0:
        return {"min": None, "median": None, "max": None}
    entries = tensor.double().flatten()
    return {"min": entries.min().item(), "median": entries.median().item(), "max": entries.max().item()}


def is_table(value: object) -> bool:
    """Returns whether a metric is a list of dicts of numbers, one for each layer, of a size that a table can show."""
    return (
        isinstance(value, list)
        and 0 < len(value) <= MOST_ROWS
        and all(isinstance(row, dict) and all(map(is_number, row.values())) for row in value)
        and len({name for row in value for name in row}) <= MOST_COLUMNS
    )


def is_group_list(value: object) -> bool:
    """Returns whether a metric is a list of groups' figures."""
    return isinstance(value, list) and bool(value) and all(map(is_group, value))


def number(value: object) -> str:
    """Returns a number as text, with four digits if it is a float; a dash for None."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def rounded(value: Any) -> Any:
    """Returns a JSON value whose floats have four digits."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def cut(text: str) -> str:
    """Returns `text`, cut to `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def inline(value: Any) -> str:
    """Returns a JSON value on one line, without the quotes and braces of the outermost level."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inline(entry)}" for key, entry in sorted(value.items())) or "none"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
