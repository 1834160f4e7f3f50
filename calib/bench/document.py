"""The results of a bench as JSON, from which the tables and the page are made."""

import platform
from pathlib import Path
from typing import Any

import torch

from calib.bench.bench_model import BenchModel
from calib.bench.grid import Found
from calib.capture.model_files import model_name
from calib.runtime.messages.dtype_name import dtype_name

FORMAT = 1
PROCESSORS = Path("/proc/cpuinfo")


def document(bench_model: BenchModel, found: Found) -> dict[str, Any]:
    """Returns all results as plain JSON."""
    request = bench_model.request
    return {
        "format": FORMAT,
        "config": {
            "name": request.name,
            "model": model_name(request.model),
            "dtype": dtype_name(bench_model.model.dtype),
            "device": bench_model.device.type,
            "artifact": bench_model.artifact_hash,
            "contexts": list(request.contexts),
            "batches": list(request.batches),
            "new_tokens": request.new_tokens,
            "turns": request.turns,
            "baseline": request.baseline or request.methods[0].label,
            "memory": request.memory,
            "seed": request.seed,
        },
        "model": {**bench_model.given.identity, "bytes": bench_model.weights},
        "versions": {**bench_model.versions(), "python": platform.python_version()},
        "machine": {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            **({"gpu": torch.cuda.get_device_name(bench_model.device)} if bench_model.peak.on_gpu else {}),
        },
        "cells": found.cells,
        "largest": found.largest,
    }


def processor() -> str:
    """Returns the processor's model name, or its architecture if the system does not report the name."""
    try:
        lines = PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
