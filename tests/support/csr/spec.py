"""All options of CSR with their values, and the chunks of tokens that are encoded together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """Options of the method `csr` for one layer; `online` is the number of a row's online atoms (M), here always given.

    With `tiers` there is no window, and `block` is ZipCache's `recompress`.
    """

    sparsity: int | Mapping[str, int] = 8
    key_chunks: int = 1
    value_chunks: int = 2
    online: int = 0
    reverse_share: float = 0.5
    coefficients: str | int = "fp16"
    pursuit: str = "matching"
    window: int = 64
    block: int = 16
    tiers: Sequence[tuple[int | Mapping[str, int], float]] | None = None
    probes: str = "random+recent"
    probe_share: float = 0.1
    corrections: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    wide: bool = False  # keys or values exceed float16

    def chunks(self, stream: str) -> int:
        """Number of vectors into which a token of one head is split."""
        return {"keys": self.key_chunks, "values": self.value_chunks}[stream]

    def pairs(self, stream: str, tier: int = 0) -> int:
        """Number of pairs of a token of one head."""
        sparsity = self.sparsity if self.tiers is None else self.tiers[tier][0]
        return sparsity if isinstance(sparsity, int) else sparsity[stream]

    def steps(self, stream: str, tier: int = 0) -> int:
        """Number of pairs of one vector."""
        return self.pairs(stream, tier) // self.chunks(stream)

    def first(self, prompt: int) -> int:
        """Number of tokens of the first chunk."""
        return max(prompt if self.tiers is not None else prompt - self.window, self.block)

    def spans(self, prompt: int, length: int) -> list[tuple[int, int]]:
        """First and last + 1 token of every chunk of a row without tiers that holds `length` tokens."""
        usable, first = length - self.window, self.first(prompt)
        if usable < first:
            return []
        return [(0, first)] + [(stop - self.block, stop) for stop in range(first + self.block, usable + 1, self.block)]
