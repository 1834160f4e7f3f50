"""One batch and one context: every row alone, then all of them in turns. A row that fails is told of and left out."""

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

REFUSALS = ("can't allocate memory", "not enough memory", "out of memory")  # a CPU's allocator has no error of its own

Failure = dict[str, Any]
Advance = Callable[[str], None]


@dataclass
class Cell:
    """What is measured, and what was found.

    Attributes:
        subject: the model.
        batch: rows at once.
        context: tokens of a prompt.
        rows: by name, the baseline first; its second row among them.
        advance: called with a row's name after each piece of work.
        cache_bytes: rows alone.
        seconds: by kind (`prefill`, `first_token`, `decode`) and name, one figure a turn.
        paired: decode seconds of the baseline in the turns of a row, where both ran together.
        failures: rows that are out.
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
        """The row that the others' times are divided by."""
        return next(iter(self.rows))

    def alive(self) -> list[str]:
        """Rows that have not failed."""
        return [name for name in self.rows if name not in self.failures]

    @contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """Inside, whatever goes wrong is told of the row `name`, and the run goes on; all that it held is free again."""
        try:
            yield
        except Exception as error:  # whatever a method or this machine's memory does, the other rows count
            self.failures[name] = told(error)
        if name in self.failures:  # behind the handler: the error held the forward's tensors
            self.bench_model.peak.settle()

    def measure(self) -> None:
        """All of it."""
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
        """Prompts in turns, each into a fresh cache that is dropped: nothing but one of them is there at a time."""
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
                    interleave.done(self.bench_model.device)  # tokens on their way to the host, too
                    end = interleave.clock()
                for kind, taken in (("prefill", end - opened), ("first_token", end - start)):
                    self.seconds.setdefault(kind, {}).setdefault(name, []).append(taken)
            self.advance(name)

    def decode(self) -> None:
        """New tokens in turns. All rows' caches are there at once; where that fails, a part of them at a time."""
        found = self.seconds.setdefault("decode", {})
        groups = [self.alive()] if self.alive() else []
        while groups:
            group = groups.pop(0)
            try:
                own = self.together(group)
            except Exception as error:  # of one of them, or of all together: smaller groups tell
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
        """Seconds a step of rows whose caches are there at once."""
        prompt = self.bench_model.prompt(self.batch, self.context)
        with ExitStack() as stack:
            rows = {name: stack.enter_context(OpenCache(self.bench_model, self.rows[name], prompt)) for name in names}
            for row in rows.values():
                row.prefill()
            return decode_interleaved(self.bench_model, rows, self.advance)

    def content(self) -> Iterator[dict[str, Any]]:
        """What was found, as plain JSON, a row each."""
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
        """Quartiles of a row's times, of the tokens a second that they make and of its speed over the baseline's; its bytes."""
        own = {kind: taken[name] for kind, taken in self.seconds.items()}
        base = {kind: taken.get(self.baseline) for kind, taken in self.seconds.items()} | {
            "decode": self.paired.get(name)
        }
        # A baseline that failed on the way has no figure for the later turns.
        ratios = {kind: speedup(x, own[kind]) for kind, x in base.items() if x and len(x) == len(own[kind])}
        # The baseline's second row is the same cache again: it is timed alone.
        alone = self.cache_bytes.get(name)
        return {
            "seconds": {kind: quartiles(taken) for kind, taken in own.items()},
            "tokens_per_second": quartiles([self.batch / taken for taken in own["decode"]]),
            "speedup": ratios if name != self.baseline else {},
            **({} if alone is None else alone.content()),
        }


def smaller(group: Sequence[str]) -> list[list[str]]:
    """Groups of about half the size that the same row leads; of a pair each by itself, of one row none."""
    first, *rest = group
    if len(rest) < 2:
        return [[name] for name in group] if rest else []
    half = len(rest) // 2
    return [[first, *rest[:half]], [first, *rest[half:]]]


def told(error: Exception) -> Failure:
    """A failure in one line, and whether it was for want of memory."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {"error": text, "out_of_memory": is_out_of_memory(error)}


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator found no room."""
    refused = isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSALS)
    return refused or isinstance(error, MemoryError | torch.OutOfMemoryError)
