"""The artifact of a fit that has not been run: its tensors by name and shape, and the bytes of its file.

A stand-in artifact of the same shapes is encoded in memory by the code that writes the real one. Two things are unknown before
the fit: its measured figures, each of which is assumed to be as long in JSON as 1/3, and the number of dictionaries when layer
groups are measured, which is assumed to be the largest possible (layers whose distributions differ completely).
"""

import math
from typing import Any

import torch
from torch import Tensor

from calib.capture.corpus import Corpus
from calib.fit.calibration import Calibration
from calib.fit.dictionaries import Dictionaries
from calib.fit.dictionary_tasks import chunks
from calib.fit.loss_curve import BITS
from calib.fit.metrics import fit_metrics
from calib.fit.provenance import provenance, settings
from calib.layer_groups.grouping import layer_groups, members
from calib.neural_dict.options import DictionaryOptions
from calib.plan.meta_model import MetaModel
from calib.runtime.artifact import file as artifact_file
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.fingerprint import fingerprint
from calib.runtime.artifact.tensor_registry import SHARE_AXES, STREAMS
from calib.runtime.artifact.transform_tensors import LOSSES

FIGURE = 1 / 3


def stand_in(
    calibration: Calibration, tried: Calibration, meta_model: MetaModel, corpus: Corpus, seed: int, batch_size: int
) -> Artifact:
    """Returns an artifact with the shapes that the fit would give for the whole model; all layers repeat one layer's numbers.

    Args:
        calibration: the fit's options.
        tried: the same options after `dry_run`: every statistic of one layer is filled.
        meta_model: the model.
        corpus: a corpus of the fit's sizes.
        seed: the fit's seed.
        batch_size: the fit's batch size.
    """
    layers = meta_model.shape.layers
    one = tried.tensors(tuple(tried.statistics))
    tensors = {name: x if name in SHARE_AXES else x.expand(layers, *x.shape[1:]) for name, x in one.items()}
    if calibration.klt:
        tensors[LOSSES["before"]] = torch.ones(len(BITS), 2)  # the same size for losses after RoPE
    groups: list[dict[str, Any]] = []
    if calibration.dictionary.atoms:
        found, groups = dictionary_tensors(calibration.dictionary, meta_model)
        tensors |= found
    figures = lengthened(fit_metrics(tried, Dictionaries()))
    figures["layers"] = [row | {"layer": layer} for layer in range(layers) for row in figures["layers"]]
    metrics = figures | ({"dictionaries": groups} if groups else {})
    config = settings(calibration, corpus, seed, batch_size)
    identity = fingerprint(meta_model.model)
    identity["weights"] = dict.fromkeys(identity["weights"], "0" * 64)
    return Artifact(tensors, identity, provenance(config, metrics), calibration.bits)


def dictionary_tensors(
    options: DictionaryOptions, meta_model: MetaModel
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Returns the tensors of layer groups, divergences and dictionaries for the largest possible divergence (ln 2) between any two
    layers, and the metrics that a fit records for each group."""
    shape, tensors, groups = meta_model.shape, dict[str, Tensor](), list[dict[str, Any]]()
    atoms, reached = options.atoms * shape.kv_heads, range(shape.layers)
    divergence = torch.full((shape.layers, shape.layers), math.log(2)).fill_diagonal_(0)
    for stream in STREAMS:
        found = layer_groups(options.groups, stream, divergence, reached, options.delta1, options.delta2)
        parts = chunks(stream, options)
        unit = torch.eye(shape.head_dim // parts, dtype=torch.float16)
        rows = unit[torch.arange(atoms) % len(unit)]
        own = members(found, reached)
        tensors |= {f"{stream}.layer_groups": found, f"{stream}.divergence": divergence}
        tensors[f"{stream}.dictionary"] = rows.expand(len(own), *rows.shape)
        groups += [
            {
                "stream": stream,
                "group": number,
                "layers": layers,
                "samples": options.samples * len(layers) * parts,
                "atoms": atoms,
                "initial_loss": FIGURE,
                "loss": FIGURE,
                "epochs": options.epochs,
                "dead": 0,
            }
            for number, layers in enumerate(own)
        ]
    return tensors, groups


def lengthened(figures: Any) -> Any:
    """Copies a JSON structure with every float, which is what a fit measures, replaced by 1/3."""
    if isinstance(figures, dict):
        return {name: lengthened(value) for name, value in figures.items()}
    if isinstance(figures, list):
        return [lengthened(value) for value in figures]
    return FIGURE if isinstance(figures, float) else figures


def file_bytes(artifact: Artifact) -> int:
    """Bytes of the artifact's file."""
    document = {
        "fingerprint": artifact.fingerprint,
        "provenance": artifact.provenance,
        "clip_bits": list(artifact.clip_bits),
    }
    return len(artifact_file.encode(artifact.tensors, document))
