"""What a bench found, for a program: everything that the tables and the page are drawn from."""

import platform
from pathlib import Path
from typing import Any

import torch

from calib.bench.grid import Found
from calib.bench.subject import BenchSubject
from calib.capture.language_model import model_name

FORMAT = 1
PROCESSORS = Path("/proc/cpuinfo")


def document(subject: BenchSubject, found: Found) -> dict[str, Any]:
    """Everything as plain JSON; it names no folder."""
    request = subject.request
    return {
        "format": FORMAT,
        "config": {
            "name": request.name,
            "model": model_name(request.model),
            "dtype": str(subject.model.dtype).removeprefix("torch."),
            "device": subject.device.type,
            "artifact": subject.artifact_hash,
            "contexts": list(request.contexts),
            "batches": list(request.batches),
            "new_tokens": request.new_tokens,
            "turns": request.turns,
            "baseline": request.baseline or request.methods[0].label,
            "memory": request.memory,
            "seed": request.seed,
        },
        "model": {**subject.given.identity, "bytes": subject.weights},
        "versions": {**subject.versions(), "python": platform.python_version()},
        "machine": {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            **({"gpu": torch.cuda.get_device_name(subject.device)} if subject.peak.on_gpu else {}),
        },
        "cells": found.cells,
        "largest": found.largest,
    }


def processor() -> str:
    """The processor's name, or its kind where the system tells no more."""
    try:
        lines = PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
