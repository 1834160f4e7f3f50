"""The largest batch that fits into a memory limit: computed from two batches, and tried on a GPU.

A cache's bytes are fixed + rows * per_row, since rows do not share data except tables, which are the fixed part; the memory of a
forward is assumed to be linear as well. Two batches give both numbers. The peak memory of a process on a CPU fluctuates, so it is
used only if a third batch agrees with the linear law; otherwise the bytes of the cache alone give an upper bound for the batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from calib.bench.bench_model import BenchModel
from calib.bench.cache_bytes import CacheBytes, measure_alone
from calib.bench.cell import told
from calib.evaluate.entries import CacheEntry

MEASURED = (1, 2)  # batches from which the linear law is computed
CHECKED = 4  # batch at which a process's peak is checked against the law
NEAR = 0.25  # largest deviation from the law in that check, as a share of a row's bytes
STEP = 32  # batches are tried in steps of batch / STEP

Known = Mapping[tuple[str, int, int], CacheBytes]  # by name, batch, context


@dataclass(frozen=True)
class Law:
    """Linear law of the bytes of a batch: `fixed` + rows * `per_row`."""

    fixed: int
    per_row: int

    @staticmethod
    def through(one: int, two: int) -> "Law":
        """Returns the law through the bytes `one` and `two` of the batches in `MEASURED`."""
        return Law(2 * one - two, two - one)

    def at(self, batch: int) -> int:
        """Returns the bytes of a batch."""
        return self.fixed + batch * self.per_row

    def largest(self, room: int) -> int:
        """Returns the largest batch whose bytes are at most `room`; 0 if not even one row fits."""
        return max((room - self.fixed) // self.per_row, 0)


def largest(
    bench_model: BenchModel, entry: CacheEntry, context: int, known: Known, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the computed and tried batches for one row and context as plain JSON, or `error` if a batch fails."""
    about = {"name": entry.label, "context": context}
    advance(entry.label)
    try:
        return about | computed_and_tried(bench_model, entry, context, known)
    except Exception as error:  # must not end the other rows
        failure = told(error)
    bench_model.peak.settle()
    return about | failure


def computed_and_tried(bench_model: BenchModel, entry: CacheEntry, context: int, known: Known) -> dict[str, Any]:
    """Returns the laws, the batch that they give, and on a GPU the largest tried batch that fits."""
    limit, on_gpu = bench_model.request.memory, bench_model.peak.on_gpu
    assert limit is not None
    one, two = (
        known.get((entry.label, batch, context))
        or measure_alone(bench_model, entry, bench_model.prompt(batch, context))
        for batch in MEASURED
    )
    cache, peak = laws(one, two, on_gpu)
    if peak is not None and not on_gpu and not confirmed(bench_model, entry, context, known, peak):
        peak = None
    computed = (peak or cache).largest(limit - bench_model.weights)
    most, tries = None, list[dict[str, Any]]()
    if on_gpu:
        with limited(bench_model.device, limit):
            most, tries = tried(lambda batch: fits(bench_model, entry, context, batch), computed)
    return {
        "cache": asdict(cache),
        "peak": None if peak is None else asdict(peak),
        "by": "cache" if peak is None else "peak",
        "computed": computed,
        "tried": most,
        "tries": tries,
    }


def confirmed(bench_model: BenchModel, entry: CacheEntry, context: int, known: Known, peak: Law) -> bool:
    """Whether the measured peak of a larger batch agrees with the law; True if the limit leaves no room for a larger batch."""
    assert bench_model.request.memory is not None
    batch = min(CHECKED, peak.largest(bench_model.request.memory - bench_model.weights))
    if batch <= MEASURED[-1]:  # nothing is extrapolated
        return True
    found = known.get((entry.label, batch, context)) or measure_alone(
        bench_model, entry, bench_model.prompt(batch, context)
    )
    return found.peak is not None and abs(found.peak - peak.at(batch)) <= NEAR * peak.per_row


def laws(one: CacheBytes, two: CacheBytes, on_gpu: bool) -> tuple[Law, Law | None]:
    """Returns the law of the cache's bytes, and the law of the peak memory of a run.

    The second is None if the peak is not known, or if it grows by less than the cache does: then the process reused memory that it
    already held, and its peak says nothing about one more row.
    """
    cache = Law.through(one.cache(on_gpu), two.cache(on_gpu))
    if one.peak is None or two.peak is None:
        return cache, None
    peak = Law.through(one.peak, two.peak)
    return cache, peak if peak.per_row >= cache.per_row else None


def tried(fits: Callable[[int], bool], computed: int) -> tuple[int, list[dict[str, Any]]]:
    """Returns the largest tried batch that fits (0 for none) and all tries, beginning with the computed batch.

    If the computed batch fits, one larger batch is tried; if not, smaller ones in growing steps until one fits.
    """
    tries: list[dict[str, Any]] = []

    def fit(batch: int) -> bool:
        tries.append({"batch": batch, "fits": fits(batch)})
        return bool(tries[-1]["fits"])

    batch = max(computed, 1)
    step = max(batch // STEP, 1)
    if fit(batch):
        return (batch + step if fit(batch + step) else batch), tries
    while batch > 1:
        batch, step = max(batch - step, 1), 2 * step
        if fit(batch):
            return batch, tries
    return 0, tries


def fits(bench_model: BenchModel, entry: CacheEntry, context: int, batch: int) -> bool:
    """Whether prompt and new tokens of a batch fit into memory; raises any other exception."""
    try:
        measure_alone(bench_model, entry, bench_model.prompt(batch, context))
        found = True
    except Exception as error:
        if not told(error)["out_of_memory"]:
            raise
        found = False
    bench_model.peak.settle()
    return found


@contextmanager
def limited(device: torch.device, limit: int) -> Iterator[None]:
    """Context manager: limit PyTorch's allocator to `limit` bytes of the GPU; the driver's own memory is not included."""
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit / whole, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
