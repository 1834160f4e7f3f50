"""The files of the exported checkpoint: new ones, the model's own, and an index of both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from calib.errors import UsageError
from calib.export.compressed_tensors.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint

SHARD = "model-kv-scales.safetensors"

# A single `model.safetensors` is renamed so: if a file of that name exists, transformers reads no index and would miss the scales.
BESIDE_INDEX = {SINGLE: "model-weights.safetensors"}


def contents(
    checkpoint: Checkpoint, config: Mapping[str, Any], scales: Mapping[str, Tensor], whole: bool
) -> dict[str, bytes | Path]:
    """Returns the new files by name: scales, configuration and index; with `whole` also the model's other files.

    Weights are not among them. Without `whole` the index has the weights' present file names: the three files then belong into
    the model's own folder. Raises `UsageError` if the model already has tensors with the names of the scales.
    """
    taken = sorted(scales.keys() & checkpoint.files.keys())
    if taken:
        raise UsageError(
            f"--model {checkpoint.folder}: has a tensor {taken[0]} already, expected a model without scales"
        )
    renamed = BESIDE_INDEX if whole else {}
    positions = {name: renamed.get(file, file) for name, file in checkpoint.files.items()} | dict.fromkeys(
        scales, SHARD
    )
    total = checkpoint.total_size + sum(scale.nbytes for scale in scales.values())
    own: dict[str, bytes | Path] = {
        CONFIG: json_bytes(config),
        INDEX: json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(positions.items()))}),
        SHARD: safetensors.torch.save(dict(scales), metadata={"format": "pt"}),
    }
    return {**{path.name: path for path in checkpoint.companions()}, **own} if whole else own


def weights(checkpoint: Checkpoint) -> dict[str, Path]:
    """Returns the model's weight files, by the names that they get beside an index."""
    return {BESIDE_INDEX.get(file, file): checkpoint.folder / file for file in sorted(set(checkpoint.files.values()))}


def json_bytes(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
