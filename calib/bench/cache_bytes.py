"""Measures one row alone: the bytes of its cache after the new tokens, and the peak memory during prefill and decoding."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from calib.bench.bench_model import BenchModel
from calib.bench.open_cache import OpenCache
from calib.evaluate.cache_size import CacheSize, sizes
from calib.evaluate.entries import CacheEntry


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a row that was run alone.

    Attributes:
        size: size of the cache at the end.
        prefill_peak: peak memory during the prefill, above what was held before; None if it cannot be measured.
        decode_peak: the same for the new tokens.
    """

    size: CacheSize
    prefill_peak: int | None
    decode_peak: int | None

    @property
    def peak(self) -> int | None:
        """The larger of both peaks; None if neither is known."""
        known = [size for size in (self.prefill_peak, self.decode_peak) if size is not None]
        return max(known, default=None)

    def cache(self, on_gpu: bool) -> int:
        """Returns the bytes of the cache on the model's device; on a CPU this includes host memory."""
        return self.size.measured_bytes + (0 if on_gpu else self.size.host_bytes)

    def content(self) -> dict[str, Any]:
        """Returns peaks and sizes as plain JSON."""
        peaks = {"prefill": self.prefill_peak, "decode": self.decode_peak}
        return {"peak_bytes": peaks, "sizes": sizes([self.size])}


def measure_alone(bench_model: BenchModel, entry: CacheEntry, prompt: Tensor) -> CacheBytes:
    """Runs prompt and new tokens with a new cache while no other cache exists; raises RunError for logits that are not finite."""
    peak = bench_model.peak
    peak.settle()
    before = peak.held()
    with OpenCache(bench_model, entry, prompt) as row:
        counts = peak.begin()
        row.prefill()
        prefill = peak.highest()
        peak.begin()
        logits = row.decode(bench_model.request.new_tokens)
        decode = peak.highest()
        row.check(logits)
        found = row.cache_size()
    if not counts or before is None:
        return CacheBytes(found, None, None)
    return CacheBytes(found, *(None if most is None else max(most - before, 0) for most in (prefill, decode)))
