"""One cell of the table: one method on one column, its figures and what its cache weighed."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from calib.errors import UsageError
from calib.evaluate.paper_counting import counted_bits
from calib.evaluate.request import MethodEntry
from calib.evaluate.tasks import Column
from calib.runtime import Artifact, Memory, compress
from calib.runtime.canonical_json import plain, sha256
from calib.runtime.methods import Geometry, options_asked

Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A row and a column.

    Attributes:
        entry: the row.
        column: the column.
        artifact: what the method is given, None for none.
        artifact_hash: SHA-256 of its file, None for none.
    """

    entry: MethodEntry
    column: Column
    artifact: Artifact | None
    artifact_hash: str | None

    @property
    def tokens(self) -> float:
        """Tokens that go through the model."""
        return self.column.rows * self.column.length

    def options(self) -> dict[str, Any]:
        """All options of the method on this column, those left at their default included, as plain JSON."""
        built = self.entry.build(self.column.title)
        options: dict[str, Any] = plain(options_asked(built), self.entry.label)
        return options

    def key(self, base: dict[str, Any]) -> str:
        """SHA-256 of everything the figures depend on; `base` is what all cells of a run share."""
        own = {"method": self.entry.method, "options": self.options(), "column": self.column.settings}
        return sha256(plain({**base, **own, "artifact": self.artifact_hash}, "cell"))

    def check(self, model: PreTrainedModel, seed: int) -> None:
        """Builds the method's cache for the model and drops it; raises UsageError for what it refuses."""
        try:
            options = self.entry.options_for(self.column.title)
            compress(model, self.entry.method, self.artifact, seed=seed, **options).release()
        except (ValueError, TypeError) as error:
            raise UsageError(f"methods: '{self.entry.label}': {error}") from error

    def measure(self, model: PreTrainedModel, seed: int, advance: Callable[[float], None]) -> Result:
        """Runs the batches, each through a cache of its own; calls `advance(tokens)` after each."""
        advance(0)  # the bar names the cell while its data are made
        batches = self.column.batches()
        parts, memories, start = [], [], time.perf_counter()
        options = self.entry.options_for(self.column.title)
        for batch in batches:
            with compress(model, self.entry.method, self.artifact, seed=seed, **options) as cache:
                parts.append(self.column.measure(cache, batch))
                memories.append(cache.memory())
            advance(self.tokens / len(batches))
        return {
            "figures": self.column.summary(parts),
            "sizes": {**sizes(memories), "paper_counting": self.paper_counting(model)},
            "seconds": round(time.perf_counter() - start, 3),
        }

    def paper_counting(self, model: PreTrainedModel) -> float | None:
        """Bits a value as the method's paper counts them, for this column's lengths."""
        shape = Geometry.of(model.config.get_text_config(decoder=True))
        width = shape.kv_heads * shape.head_dim
        column = self.column
        return counted_bits(self.entry.method, self.options(), shape.head_dim, width, column.prompt, column.length)


def sizes(memories: Sequence[Memory]) -> dict[str, Any]:
    """The batches' caches together, as they were at the end of their rows: bytes are sums, bits are over all values.

    `by_kind` has the predicted bytes of every kind of which there are any.
    """
    measured = sum(memory.measured_bytes for memory in memories)
    values = sum(8 * memory.measured_bytes / memory.bits_per_value for memory in memories if memory.bits_per_value)
    bits = 8 * measured / values if values else 0.0
    return {
        "bits_per_value": bits,
        "share_of_16_bits": bits / 16,
        "marginal_bits": sum(memory.marginal_bits for memory in memories) / len(memories),
        "measured_bytes": measured,
        "predicted_bytes": sum(memory.predicted_bytes for memory in memories),
        "host_bytes": sum(memory.host_bytes for memory in memories),
        "by_kind": dict(sum((Counter(memory.by_kind) for memory in memories), Counter[str]())),
        "compressed_layers": memories[0].compressed_layers,
        "layers": memories[0].layers,
    }
