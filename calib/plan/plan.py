"""`calib fit --plan`: the plan of a fit as plain JSON: passes, statistics, artifact, memory, disk space, time, cache sizes."""

from dataclasses import asdict
from typing import Any

import torch

from calib.bench.peak import resident
from calib.capture.data import CaptureData
from calib.fit.calibration import Calibration
from calib.fit.dictionary_tasks import check_dictionaries, chunks, sparsity
from calib.plan.artifact_size import file_bytes, stand_in
from calib.plan.cache_sizes import cache_sizes
from calib.plan.capture_cost import Sizes, passes, statistics
from calib.plan.dry_run import dry_run
from calib.plan.duration import Work, extrapolated
from calib.plan.meta_model import MetaModel, read_meta_model
from calib.plan.peaks import peaks
from calib.plan.probe import Pace, measured_pace
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.tensor_registry import STREAMS

# Ratio of real to predicted time of the stages of real fits (docs/plan.md, "Compared with real fits"): 1 / 2.4 to 1 / .8.
LEAST, MOST = 0.4, 1.3

BUDGET = 3.0  # approximate seconds for timing forwards and statistics


def make_plan(
    calibration: Calibration,
    data: CaptureData,
    seed: int,
    batch: int,
    context: int,
    device: torch.device,
    processes: int,
) -> dict[str, Any]:
    """Returns the plan of a fit.

    Args:
        calibration: the fit's options.
        data: the options of the corpus, which is not read.
        seed: the fit's seed.
        batch: rows of the caches whose sizes are predicted.
        context: tokens of each row of these caches.
        device: where the fit runs and pieces of it are timed.
        processes: number of processes of the fit.

    Raises:
        UsageError: if there is no such model, or it cannot have the requested dictionaries.
    """
    libraries = resident("VmRSS")
    meta_model = read_meta_model(calibration.path, calibration.dtype_name)
    sizes = Sizes.of(data, meta_model, processes)
    if calibration.dictionary.atoms:
        check_dictionaries(calibration.dictionary, meta_model.shape, sizes.train * sizes.length)
    found, stages = statistics(calibration, meta_model), passes(calibration, sizes)
    held = sum(one["bytes"] for one in found.values())
    tried = dry_run(calibration, meta_model, sizes.length)
    corpus = sizes.corpus(data)
    artifact = stand_in(calibration, tried, meta_model, corpus, seed, sizes.batch)
    size, on_gpu = file_bytes(artifact), device.type != "cpu"
    return {
        "model": {**meta_model.content(calibration.path), "device_map": calibration.device_map},
        "corpus": {
            "name": corpus.origin["name"],
            **asdict(sizes),
            "tokens": corpus.train.numel() + corpus.heldout.numel(),
        },
        "passes": [one.content() for one in stages],
        "statistics": {"bytes": held, "each": found},
        "dictionaries": dictionaries_content(calibration, meta_model, artifact),
        "artifact": {
            "bytes": size,
            "tensors": {name: list(tensor.shape) for name, tensor in artifact.tensors.items()},
        },
        "memory": {
            "gpu": on_gpu,
            "libraries_bytes": libraries,
            "stages": [asdict(one) for one in peaks(calibration, meta_model, sizes, held, on_gpu)],
        },
        "disk": disk_content(calibration, artifact, len(stages), held, size),
        "seconds": seconds_content(Work(calibration, meta_model, sizes, stages, held), device),
        "cache": cache_sizes(meta_model, artifact, batch, context),
    }


def dictionaries_content(calibration: Calibration, meta_model: MetaModel, artifact: Artifact) -> dict[str, Any] | None:
    """Returns sizes and training steps of the dictionaries of keys and of values, for the most groups of layers; None if none."""
    options, shape = calibration.dictionary, meta_model.shape
    if not options.atoms:
        return None
    found = {}
    for stream in STREAMS:
        parts = chunks(stream, options)
        vectors = shape.layers * options.samples * parts
        found[stream] = {
            "groups": len(artifact.tensor(f"{stream}.dictionary")),
            "atoms": options.atoms * shape.kv_heads,
            "channels": shape.head_dim // parts,
            "pairs": sparsity(stream, options),
            "vectors": vectors,
            "steps": shape.layers * options.epochs * -(-options.samples * parts // options.batch_size),
        }
    return {"chosen": options.groups, "epochs": options.epochs, "batch_size": options.batch_size, "streams": found}


def disk_content(calibration: Calibration, artifact: Artifact, stages: int, held: int, size: int) -> dict[str, int]:
    """Bytes that a fit leaves in its folder and at `output`, and of a checkpoint that is written while the old one still exists."""
    atoms = sum(artifact.tensors[f"{one}.dictionary"].numel() for one in STREAMS) if calibration.dictionary.atoms else 0
    found = {
        "statistics_checkpoints": stages * held,
        "written_beside": held,
        "dictionaries_checkpoint": 4 * 4 * atoms,  # float32: atoms, both of Adam's moments, the best so far
        "artifact": size,
        "copy_of_the_logger": size,
    }
    return found | {"total": sum(found.values())}


def seconds_content(work: Work, device: torch.device) -> dict[str, Any]:
    """Returns the seconds of all stages and their sum, extrapolated from pieces of work timed on `device`."""

    def measured() -> tuple[Pace, dict[str, float]]:
        pace = measured_pace(work.calibration, work.meta_model, work.sizes, device, BUDGET)
        return pace, work.seconds(pace)

    return extrapolated(measured, device, (LEAST, MOST), asdict)
