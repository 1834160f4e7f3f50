"""Sizes of a cell's caches (one for each batch) after their last token, and of all of them together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calib.runtime import Memory


@dataclass(frozen=True)
class CacheSize:
    """Size of one cache.

    Attributes:
        measured_bytes: storage of all its tensors on the device.
        values: key and value elements of the tokens seen, without padding.
        host_bytes: storage of its tensors in host memory.
        predicted_bytes: bytes predicted from shapes alone; None if there is no prediction.
        marginal_bits: bits per value of one more token; None if unknown.
        by_kind: predicted bytes of every kind (codes, parameters, tables ...).
        layers: number of compressed attention layers and of all attention layers; None if unknown.
        dynamic_bytes: bytes of a `DynamicCache` in the model's dtype for the same tokens; None if unknown.
        encoded: whether any token has been encoded; if not, the bytes say nothing about the method.
    """

    measured_bytes: int
    values: float
    host_bytes: int = 0
    predicted_bytes: int | None = None
    marginal_bits: float | None = None
    by_kind: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, int] | None = None
    dynamic_bytes: int | None = None
    encoded: bool = True

    @staticmethod
    def of(memory: Memory) -> "CacheSize":
        """Returns the size of a compressed cache from its memory report."""
        measured, bits = memory.measured_bytes, memory.bits_per_value
        return CacheSize(
            measured_bytes=measured,
            values=8 * measured / bits if bits else 0.0,
            host_bytes=memory.host_bytes,
            predicted_bytes=memory.predicted_bytes,
            marginal_bits=memory.marginal_bits,
            by_kind=memory.by_kind,
            layers=(memory.compressed_layers, memory.layers),
            dynamic_bytes=memory.dynamic_bytes,
            encoded=not memory.nothing_encoded,
        )


def is_encoded(size: Mapping[str, Any]) -> bool:
    """Whether any token was encoded, so that the sizes say something about the method; True for runs without this entry."""
    return bool(size.get("encoded", True))


def sizes(caches: Sequence[CacheSize]) -> dict[str, Any]:
    """Combines the sizes of all batches' caches: sums of bytes, bits per value over all values; None for what is unknown.

    `marginal_bits` is the mean over the caches. `by_kind` has the kinds with predicted bytes. `encoded` is false if no batch's
    cache has encoded a token.
    """
    measured, values = sum(size.measured_bytes for size in caches), sum(size.values for size in caches)
    bits = 8 * measured / values if values else 0.0
    predicted = [size.predicted_bytes for size in caches if size.predicted_bytes is not None]
    marginal = [size.marginal_bits for size in caches if size.marginal_bits is not None]
    dynamic = [size.dynamic_bytes for size in caches if size.dynamic_bytes is not None]
    known = len(dynamic) == len(caches) and sum(dynamic) > 0
    compressed, layers = caches[0].layers or (None, None)
    return {
        "bits_per_value": bits,
        "encoded": any(size.encoded for size in caches),
        "dynamic_bytes": sum(dynamic) if known else None,
        "share_of_dynamic": measured / sum(dynamic) if known else None,
        "marginal_bits": sum(marginal) / len(marginal) if marginal else None,
        "measured_bytes": measured,
        "predicted_bytes": sum(predicted) if predicted else None,
        "host_bytes": sum(size.host_bytes for size in caches),
        "by_kind": dict(sum((Counter(size.by_kind) for size in caches), Counter[str]())),
        "compressed_layers": compressed,
        "layers": layers,
    }
