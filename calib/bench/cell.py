"""Measures one batch and one context: every row alone, then all rows in turns. A row that fails is reported and left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from calib.bench import interleave
from calib.bench.bench_model import BenchModel
from calib.bench.cache_bytes import CacheBytes, measure_alone
from calib.bench.interleave import decode_interleaved, interleaved, quartiles, speedup
from calib.bench.open_cache import OpenCache
from calib.bench.request import AGAIN, title_of
from calib.evaluate.entries import CacheEntry

REFUSALS = ("can't allocate memory", "not enough memory", "out of memory")  # on a CPU these are plain RuntimeErrors

Failure = dict[str, Any]
Advance = Callable[[str], None]


@dataclass
class Cell:
    """The measurement of one batch and context, and its results.

    Attributes:
        bench_model: the model and the request.
        batch: rows of the batch.
        context: tokens of a prompt.
        rows: rows of the table by name, the baseline first; they include a second row of the baseline.
        advance: called with a row's name after each piece of work.
        cache_bytes: bytes of each row that was run alone, by name.
        seconds: by kind (`prefill`, `first_token`, `decode`) and name, one figure for each turn.
        paired: for each row, the baseline's decode seconds in the same turns, if both ran together.
        failures: failures by name; these rows are not run any more.
    """

    bench_model: BenchModel
    batch: int
    context: int
    rows: Mapping[str, CacheEntry]
    advance: Advance
    cache_bytes: dict[str, CacheBytes] = field(default_factory=dict)
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    paired: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """Name of the row that speeds are relative to."""
        return next(iter(self.rows))

    def alive(self) -> list[str]:
        """Returns the names of the rows that have not failed."""
        return [name for name in self.rows if name not in self.failures]

    @contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """Context manager: record any exception as the failure of the row `name`, and free its memory."""
        try:
            yield
        except Exception as error:  # an error of a method, or too little memory, must not end the other rows
            self.failures[name] = told(error)
        if name in self.failures:  # outside the handler, since the exception keeps the forward's tensors alive
            self.bench_model.peak.settle()

    def measure(self) -> None:
        """Measures all rows: alone, then prefill and decoding in turns."""
        prompt = self.bench_model.prompt(self.batch, self.context)
        again = self.baseline + AGAIN
        for name in [name for name in self.rows if name != again]:
            with self.surviving(name):
                self.cache_bytes[name] = measure_alone(self.bench_model, self.rows[name], prompt)
            self.advance(name)
        if self.baseline in self.failures:
            self.failures[again] = self.failures[self.baseline]
        self.prefill()
        self.decode()

    def prefill(self) -> None:
        """Times the prefill of all rows in turns, each with a new cache, so that only one cache exists at a time."""
        request = self.bench_model.request
        prompt = self.bench_model.prompt(self.batch, self.context)
        for _, name in interleaved(request.seed, request.turns, self.alive):
            if name in self.failures:
                continue
            with self.surviving(name):
                interleave.ready(self.bench_model.device)
                start = interleave.clock()
                with OpenCache(self.bench_model, self.rows[name], prompt) as row:
                    opened = interleave.clock()
                    row.prefill()
                    interleave.done(self.bench_model.device)  # waits for copies to the host as well
                    end = interleave.clock()
                for kind, taken in (("prefill", end - opened), ("first_token", end - start)):
                    self.seconds.setdefault(kind, {}).setdefault(name, []).append(taken)
            self.advance(name)

    def decode(self) -> None:
        """Times new tokens in turns, with all rows' caches in memory together, or in smaller groups if that fails."""
        found = self.seconds.setdefault("decode", {})
        groups = [self.alive()] if self.alive() else []
        while groups:
            group = groups.pop(0)
            try:
                own = self.together(group)
            except Exception as error:  # smaller groups show whether one row or all together caused it
                failure = told(error)
            else:
                for name, taken in own.items():
                    if found.setdefault(name, taken) is taken and self.baseline in own:
                        self.paired[name] = own[self.baseline]
                continue
            self.bench_model.peak.settle()
            if len(group) == 1:
                self.failures[group[0]] = failure
            groups = [part for part in smaller(group) if any(name not in found for name in part)] + groups

    def together(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Returns the seconds per step of the rows `names`, whose caches are in memory together."""
        prompt = self.bench_model.prompt(self.batch, self.context)
        with ExitStack() as stack:
            rows = {name: stack.enter_context(OpenCache(self.bench_model, self.rows[name], prompt)) for name in names}
            for row in rows.values():
                row.prefill()
            return decode_interleaved(self.bench_model, rows, self.advance)

    def content(self) -> Iterator[dict[str, Any]]:
        """Yields the results of each row as plain JSON."""
        for name, entry in self.rows.items():
            shown = {
                "name": name,
                "group": entry.group,
                "method": entry.method,
                "options": entry.all_options(title_of(self.context)),
                "artifact": entry.uses_artifact,
                "batch": self.batch,
                "context": self.context,
            }
            yield {**shown, **(self.failures[name] if name in self.failures else self.figures(name))}

    def figures(self, name: str) -> dict[str, Any]:
        """Returns quartiles of a row's times, tokens per second and speed relative to the baseline, and its bytes."""
        own = {kind: taken[name] for kind, taken in self.seconds.items()}
        base = {kind: taken.get(self.baseline) for kind, taken in self.seconds.items()} | {
            "decode": self.paired.get(name)
        }
        # A baseline that failed during the measurement has no figures for the later turns.
        ratios = {kind: speedup(x, own[kind]) for kind, x in base.items() if x and len(x) == len(own[kind])}
        # The baseline's second row is the same cache again: it is timed, but its bytes are not measured.
        alone = self.cache_bytes.get(name)
        return {
            "seconds": {kind: quartiles(taken) for kind, taken in own.items()},
            "tokens_per_second": quartiles([self.batch / taken for taken in own["decode"]]),
            "speedup": ratios if name != self.baseline else {},
            **({} if alone is None else alone.content()),
        }


def smaller(group: Sequence[str]) -> list[list[str]]:
    """Splits a group into two of about half its size that both begin with its first row; a pair into single rows."""
    first, *rest = group
    if len(rest) < 2:
        return [[name] for name in group] if rest else []
    half = len(rest) // 2
    return [[first, *rest[:half]], [first, *rest[half:]]]


def told(error: Exception) -> Failure:
    """Returns an exception as one line of text, and whether memory was exhausted."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {"error": text, "out_of_memory": is_out_of_memory(error)}


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception means that memory was exhausted."""
    refused = isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSALS)
    return refused or isinstance(error, MemoryError | torch.OutOfMemoryError)
