"""The groups of layers in an artifact, with the figures of their dictionaries if the provenance has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.tensor_registry import STREAMS

LOSSES = ("initial_loss", "loss")


@dataclass(frozen=True)
class Group:
    """One group of layers of one stream.

    Attributes:
        name: such as `keys.0`.
        stream: `keys` or `values`.
        layers: numbers of its layers, which are consecutive.
        atoms: number of atoms of its dictionary; None without a dictionary.
        channels: channels of an atom; None without a dictionary.
        figures: the fit's figures, at least both losses; empty if the provenance has none.
    """

    name: str
    stream: str
    layers: Sequence[int]
    atoms: int | None
    channels: int | None
    figures: Mapping[str, float]


def groups(artifact: Artifact) -> list[Group]:
    """Returns all groups, those of keys first."""
    metrics = artifact.provenance.get("metrics")
    listed = metrics.get("dictionaries") if isinstance(metrics, dict) else None
    rows = [row for row in listed if is_group(row)] if isinstance(listed, list) else []
    figures = {(row["stream"], row["group"]): row for row in rows}
    found = []
    for stream in STREAMS:
        if not artifact.has(f"{stream}.layer_groups"):
            continue
        numbers = artifact.tensor(f"{stream}.layer_groups").tolist()
        dictionary = f"{stream}.dictionary"
        atoms, channels = artifact.tensor(dictionary).shape[1:] if artifact.has(dictionary) else (None, None)
        for number in range(numbers[-1] + 1):
            layers = [layer for layer, group in enumerate(numbers) if group == number]
            name, own = f"{stream}.{number}", figures.get((stream, number), {})
            found.append(Group(name, stream, layers, atoms, channels, own))
    return found


def is_group(row: Any) -> bool:
    """Returns whether `row` is a dict of a group's figures as `calib fit` writes it."""
    return (
        isinstance(row, dict)
        and row.get("stream") in STREAMS
        and type(row.get("group")) is int
        and all(is_number(row.get(name)) and row[name] >= 0 for name in LOSSES)
        and all(is_number(row.get(name)) for name in ("epochs", "dead"))
    )


def is_number(value: object) -> bool:
    """Returns whether `value` is a number that can be drawn (below 2^53, and no bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
