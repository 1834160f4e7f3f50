"""One row by itself: what its cache weighs behind the new tokens, and the most memory that it took on the way."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from calib.bench.open_row import OpenRow
from calib.bench.subject import BenchSubject
from calib.evaluate.entries import CacheEntry
from calib.evaluate.weight import Weight, sizes


@dataclass(frozen=True)
class Weighed:
    """Bytes of a row alone.

    Attributes:
        weight: the cache's, at the end.
        prefill_peak: the most above what was held before, while the prompt went in; None where nobody tells.
        decode_peak: the same of the new tokens.
    """

    weight: Weight
    prefill_peak: int | None
    decode_peak: int | None

    @property
    def peak(self) -> int | None:
        """The most of both."""
        known = [size for size in (self.prefill_peak, self.decode_peak) if size is not None]
        return max(known, default=None)

    def cache(self, on_gpu: bool) -> int:
        """Bytes of the cache where the model is: on a CPU host memory is the same memory."""
        return self.weight.measured_bytes + (0 if on_gpu else self.weight.host_bytes)

    def content(self) -> dict[str, Any]:
        """As plain JSON."""
        peaks = {"prefill": self.prefill_peak, "decode": self.decode_peak}
        return {"peak_bytes": peaks, "sizes": sizes([self.weight])}


def weigh(subject: BenchSubject, entry: CacheEntry, prompt: Tensor) -> Weighed:
    """Prompt and new tokens through a cache of its own, nothing else being there; raises RunError for logits that are none."""
    peak = subject.peak
    peak.settle()
    before = peak.held()
    with OpenRow(subject, entry, prompt) as row:
        counts = peak.begin()
        row.prefill()
        prefill = peak.highest()
        peak.begin()
        logits = row.decode(subject.request.new_tokens)
        decode = peak.highest()
        row.check(logits)
        found = row.weigh()
    if not counts or before is None:
        return Weighed(found, None, None)
    return Weighed(found, *(None if most is None else max(most - before, 0) for most in (prefill, decode)))
