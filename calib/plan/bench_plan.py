"""`calib bench --plan`: the plan of a bench as plain JSON: cache sizes, memory, disk space and time."""

from collections.abc import Mapping
from typing import Any

import torch

from calib.bench.grid import by_name
from calib.bench.interleave import PAUSE
from calib.bench.largest_batch import CHECKED, MEASURED, Law
from calib.bench.request import BenchRequest, title_of
from calib.evaluate.entries import CacheEntry
from calib.evaluate.loaded import read_artifact
from calib.plan.meta_model import read_meta_model
from calib.plan.run_memory import RunMemory, at_most, placed
from calib.plan.run_time import RunPace, seconds_content

# Bytes of the three reports without rows, and of one row of one cell in them, taken from published runs (docs/plan.md).
REPORTS, ROW = 20_000, 2000


def make_bench_plan(request: BenchRequest) -> dict[str, Any]:
    """Returns the plan of a bench.

    Raises UsageError if the model or artifact cannot be read, or if a context is longer than the model's positions allow.
    """
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    artifact, _ = read_artifact(request.artifact)
    meta_model = read_meta_model(request.model, request.dtype)
    request.check_positions(meta_model.longest)
    memory, rows, on_gpu = RunMemory(meta_model, artifact), by_name(request), request.device != "cpu"
    weights = memory.weights()
    cells = [
        cell_content(memory, request, rows, batch, context, weights, on_gpu)
        for context in request.contexts
        for batch in request.batches
    ]
    shown = len(rows) * len(cells)
    return {
        "kind": "bench",
        "name": request.name,
        "model": meta_model.content(request.model),
        "new_tokens": request.new_tokens,
        "turns": request.turns,
        "cells": cells,
        "limit": request.memory,
        "largest": largest(memory, request, weights, on_gpu),
        "memory": {"gpu": on_gpu, "weights": weights},
        "disk": {"cells": shown, "total": REPORTS + shown * ROW},
        "seconds": seconds_content(
            meta_model,
            request.device,
            "model",
            max(request.contexts),
            lambda pace: seconds(pace, request, len(rows), on_gpu),
        ),
    }


def cell_content(
    memory: RunMemory,
    request: BenchRequest,
    rows: Mapping[str, CacheEntry],
    batch: int,
    context: int,
    weights: int,
    on_gpu: bool,
) -> dict[str, Any]:
    """Sizes for one batch and context: every row's cache after the new tokens, and the peak with all caches together and with the
    largest cache alone."""
    new, beside = request.new_tokens, memory.forward(batch, context) + memory.logits(batch)
    sizes = {name: memory.cache(entry, title_of(context), batch, context, new) for name, entry in rows.items()}
    there = [size for size in sizes.values() if size.refused is None]
    device, host = sum(size.device for size in there), sum(size.host for size in there)
    alone = max(there, key=lambda size: size.device + size.host, default=None)
    values = memory.values(batch, context + new)
    return {
        "batch": batch,
        "context": context,
        "rows": {name: {"at_most": at_most(rows[name]), **size.content(values)} for name, size in sizes.items()},
        "beside": beside,
        "together": placed(weights + device + beside, host, on_gpu),
        "alone": None if alone is None else placed(weights + alone.device + beside, alone.host, on_gpu),
    }


def largest(memory: RunMemory, request: BenchRequest, weights: int, on_gpu: bool) -> list[dict[str, Any]]:
    """Returns, for every method row and context, the largest batch that fits into `request.memory`, activations included."""
    if request.memory is None:
        return []
    found = []
    for context in request.contexts:
        for entry in request.methods:
            about, title, new = {"name": entry.label, "context": context}, title_of(context), request.new_tokens
            sizes = [memory.cache(entry, title, batch, context, new) for batch in MEASURED]
            if sizes[0].refused is not None:
                continue
            taken = [
                size.device + (0 if on_gpu else size.host) + memory.forward(batch, context) + memory.logits(batch)
                for size, batch in zip(sizes, MEASURED, strict=True)
            ]
            law = Law.through(*taken)
            found.append(
                {
                    **about,
                    "at_most": at_most(entry),
                    "batch": law.largest(request.memory - weights),
                    "fixed": law.fixed,
                    "per_row": law.per_row,
                }
            )
    return found


def seconds(pace: RunPace, request: BenchRequest, rows: int, on_gpu: bool) -> dict[str, float]:
    """Returns the seconds of each part of a bench: every row alone, prompts in turns, new tokens in turns, and the cells that the
    largest batches are computed from; `rows` counts the baseline's second row too."""
    found = dict.fromkeys(("rows alone", "prompts", "new tokens", "largest batches"), 0.0)
    methods, new, turns = rows - 1, request.new_tokens, request.turns
    pause = 0.0 if on_gpu else PAUSE * turns * rows
    for context in request.contexts:
        for batch in request.batches:
            prompt, step = pace.prefill(batch, context), pace.step(batch, 1, context)
            found["rows alone"] += methods * (prompt + new * step)
            found["prompts"] += turns * rows * prompt + pause
            found["new tokens"] += rows * (prompt + (new + 1) * step) + pause
        if request.memory is not None:
            for batch in {*MEASURED, *(() if on_gpu else (CHECKED,))} - {*request.batches}:
                once = pace.prefill(batch, context) + new * pace.step(batch, 1, context)
                found["largest batches"] += methods * once
    first = min(request.batches), min(request.contexts)
    found["rows alone"] += methods * (pace.prefill(*first) + new * pace.step(first[0], 1, first[1]))  # warming up
    return found
