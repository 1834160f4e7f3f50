"""`calib eval --plan`: the plan of an evaluation as plain JSON: columns, cache sizes, memory, disk space and time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from calib.evaluate.entries import CacheEntry, Entry
from calib.evaluate.evaluation import fitting
from calib.evaluate.loaded import read_artifact
from calib.evaluate.request import Request
from calib.evaluate.tasks import Column
from calib.plan.cache_sizes import CacheSize
from calib.plan.meta_model import read_meta_model
from calib.plan.planned_subject import PlannedSubject, planned_tokenizer
from calib.plan.run_memory import LOGIT, RunMemory, at_most, placed
from calib.plan.run_time import RunPace, seconds_content

# Bytes of the three reports without cells, and of one cell in them and in its own file, taken from published runs (docs/plan.md).
REPORTS, CELL = 25_000, 5000


@dataclass(frozen=True)
class ColumnWork:
    """The forwards and the memory that a column of a task needs with one method.

    Attributes:
        column: the column, made without the model's weights.
        batch: number of rows evaluated at once.
    """

    column: Column
    batch: int

    @staticmethod
    def of(column: Column, request: Request) -> "ColumnWork":
        """The work of `column` with the request's batch size, but no more rows at once than the column has."""
        return ColumnWork(column, min(request.batch_size, column.rows))

    @property
    def longest(self) -> int:
        """Tokens of the longest row in the cache."""
        return math.ceil(getattr(self.column, "longest_row", self.column.length))

    @property
    def prompt(self) -> int:
        """Tokens of the longest row's first forward."""
        return min(self.longest, math.ceil(self.column.prompt + self.longest - self.column.length))

    @property
    def chunk(self) -> int:
        """Tokens of a forward after the prompt."""
        return min(getattr(self.column, "chunk", 1), max(1, self.longest - self.prompt))

    @property
    def steps(self) -> int:
        """Number of forwards after a batch's prompt."""
        return math.ceil((self.column.length - self.column.prompt) / self.chunk)

    @property
    def batches(self) -> int:
        """Number of batches that the column's rows are evaluated in."""
        return math.ceil(self.column.rows / self.batch)

    @property
    def kept(self) -> int:
        """Bytes of answers that stay in host memory from one method to the next."""
        return int(getattr(self.column, "kept_bytes", 0))

    def cache(self, memory: RunMemory, entry: CacheEntry) -> CacheSize:
        """Size of the cache of `entry` for one batch whose rows are all as long as the longest row."""
        return memory.cache(entry, self.column.title, self.batch, self.prompt, self.longest - self.prompt)

    def logits(self, memory: RunMemory) -> int:
        """Bytes of the logits of the forward that needs most of them."""
        return memory.logits(self.batch * (self.chunk if self.steps else 1), getattr(self.column, "logit_bytes", LOGIT))

    def seconds(self, pace: RunPace, methods: int) -> float:
        """Seconds of the model's forwards for `methods` methods; if answers are kept, the pass that makes them is added."""
        rows, column = self.column.rows / self.batch, self.column
        one = pace.prefill(self.batch, column.prompt) * getattr(column, "passes", 1)
        if self.steps:
            between = round((column.prompt + column.length) / 2)
            one += self.steps * pace.step(self.batch, self.chunk, between)
        return rows * one * (methods + bool(self.kept))

    def content(self, methods: int) -> dict[str, Any]:
        """Returns the work as plain JSON, for `methods` methods."""
        return {
            "title": self.column.title,
            "task": self.column.settings["task"],
            "methods": methods,
            "rows": self.column.rows,
            "batch": self.batch,
            "prompt": self.column.prompt,
            "tokens_of_a_row": self.column.length,
            "longest_row": self.longest,
            "forwards": self.batches * (1 + self.steps) * getattr(self.column, "passes", 1),
            "tokens": round(self.column.rows * self.column.length * methods),
            "kept_bytes": self.kept,
        }


def make_eval_plan(request: Request, only: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the plan of an evaluation.

    Args:
        request: the checked request.
        only: patterns that select rows, as in `--only`.

    Raises:
        UsageError: if the model, the artifact or a text is missing, a pattern matches no row, or the model does not allow a task.
    """
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    artifact, _ = read_artifact(request.artifact)
    meta_model = read_meta_model(request.model, request.dtype)
    tokenizer, no_tokenizer = planned_tokenizer(request.model)
    subject = PlannedSubject(meta_model.model, tokenizer, request.seed, request.batch_size, request.limit)
    works = [ColumnWork.of(column, request) for task in request.tasks for column in task.columns(subject)]
    entries = fitting(request.methods, only)
    memory, on_gpu = RunMemory(meta_model, artifact), not request.device.startswith("cpu")
    asked = {work.column.title: [entry for entry in entries if serves(entry, work.column)] for work in works}
    caches = [largest_cache(memory, entry, [w for w in works if entry in asked[w.column.title]]) for entry in entries]
    weights = memory.weights(request.products)
    cells = sum(map(len, asked.values()))
    return {
        "kind": "evaluation",
        "name": request.name,
        "model": meta_model.content(request.model),
        "no_tokenizer": no_tokenizer,
        "batch_size": request.batch_size,
        "cells": cells,
        "columns": [work.content(len(asked[work.column.title])) for work in works],
        "memory": {"gpu": on_gpu, "weights": weights, **peak(memory, works, asked, weights, on_gpu)},
        "disk": {"cells": cells, "total": REPORTS + cells * CELL},
        "caches": [one for one in caches if one is not None],
        "seconds": seconds_content(
            meta_model,
            request.device,
            request.products,
            max(work.prompt for work in works),
            lambda pace: {w.column.title: w.seconds(pace, len(asked[w.column.title])) for w in works},
        ),
    }


def serves(entry: Entry, column: Column) -> bool:
    """Whether `entry` has a cache that can be evaluated on the column; answers read from a file have no cache."""
    return isinstance(entry, CacheEntry) and entry.serves(column)


def largest_cache(memory: RunMemory, entry: Entry, works: Sequence[ColumnWork]) -> dict[str, Any] | None:
    """Returns the largest cache of a row and the column that needs it, or why the method refuses the model; None for no cache."""
    if not isinstance(entry, CacheEntry) or not works:
        return None
    sizes = [(work.cache(memory, entry), work) for work in works]
    about = {"name": entry.label, "at_most": at_most(entry)}
    if refused := next((size.refused for size, _ in sizes if size.refused is not None), None):
        return {**about, "refused": refused}
    size, work = max(sizes, key=lambda pair: pair[0].device + pair[0].host)
    where = {"column": work.column.title, "batch": work.batch, "tokens": work.longest}
    return {**about, **where, **size.content(memory.values(work.batch, work.longest))}


def peak(
    memory: RunMemory, works: Sequence[ColumnWork], asked: dict[str, list[Entry]], weights: int, on_gpu: bool
) -> dict[str, Any]:
    """Returns the peak memory with its row and column; answers kept between methods (`kept`) are counted for all columns."""
    kept, found = sum(work.kept for work in works), list[dict[str, Any]]()
    for work in works:
        beside = memory.forward(work.batch, work.prompt) + work.logits(memory)
        for entry in asked[work.column.title]:
            assert isinstance(entry, CacheEntry)
            size = work.cache(memory, entry)
            if size.refused is None:
                total = placed(weights + size.device + beside, size.host + kept, on_gpu)
                where = {"row": entry.label, "column": work.column.title}
                found.append({**total, **where, "cache": size.device + size.host, "beside": beside})
    if not found:
        return {"kept": kept, "most": None}
    return {"kept": kept, "most": max(found, key=lambda one: (one["device"], one["host"]))}
