"""What the caches of a cell weighed at the end of their rows, one weight a batch, and all of them together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calib.runtime import Memory


@dataclass(frozen=True)
class Weight:
    """One cache.

    Attributes:
        measured_bytes: storage of every tensor on the device.
        values: key and value elements of the real tokens seen.
        host_bytes: storage of tensors placed in host memory.
        predicted_bytes: from shapes alone; None where nobody predicts them.
        marginal_bits: bits a value of one more token; None where it is not known.
        by_kind: predicted bytes of every kind.
        layers: attention layers that are compressed, and in all; None where it is not known.
    """

    measured_bytes: int
    values: float
    host_bytes: int = 0
    predicted_bytes: int | None = None
    marginal_bits: float | None = None
    by_kind: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, int] | None = None

    @staticmethod
    def of(memory: Memory) -> "Weight":
        """A compressed cache's."""
        measured, bits = memory.measured_bytes, memory.bits_per_value
        return Weight(
            measured_bytes=measured,
            values=8 * measured / bits if bits else 0.0,
            host_bytes=memory.host_bytes,
            predicted_bytes=memory.predicted_bytes,
            marginal_bits=memory.marginal_bits,
            by_kind=memory.by_kind,
            layers=(memory.compressed_layers, memory.layers),
        )


def sizes(weights: Sequence[Weight]) -> dict[str, Any]:
    """The batches' caches together: bytes are sums, bits are over all values; None for what is not known of them.

    `by_kind` has the predicted bytes of every kind of which there are any.
    """
    measured, values = sum(weight.measured_bytes for weight in weights), sum(weight.values for weight in weights)
    bits = 8 * measured / values if values else 0.0
    predicted = [weight.predicted_bytes for weight in weights if weight.predicted_bytes is not None]
    marginal = [weight.marginal_bits for weight in weights if weight.marginal_bits is not None]
    compressed, layers = weights[0].layers or (None, None)
    return {
        "bits_per_value": bits,
        "share_of_16_bits": bits / 16,
        "marginal_bits": sum(marginal) / len(marginal) if marginal else None,
        "measured_bytes": measured,
        "predicted_bytes": sum(predicted) if predicted else None,
        "host_bytes": sum(weight.host_bytes for weight in weights),
        "by_kind": dict(sum((Counter(weight.by_kind) for weight in weights), Counter[str]())),
        "compressed_layers": compressed,
        "layers": layers,
    }
