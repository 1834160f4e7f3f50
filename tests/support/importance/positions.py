"""Float64 oracles of StreamingLLM and of oracle eviction."""

import numpy as np
from importance.draws import count
from importance.layer import EVICTED, LayerOracle


class StreamingLLM(LayerOracle):
    """StreamingLLM (arXiv:2309.17453): the first tokens (one tier) and the newest of the others (another), exact."""

    def __init__(
        self, sinks: int = 4, window: int = 1020, positions: str = "cache", frequencies: np.ndarray | None = None
    ) -> None:
        """`frequencies [D / 2]` are RoPE's inverse frequencies, needed for positions inside the cache."""
        super().__init__([16, 16])
        self.sinks, self.window, self.positions = sinks, window, positions
        self.frequencies = None if frequencies is None else np.asarray(frequencies, dtype=np.float64)

    def distances(self, queries: int, before: int) -> np.ndarray:
        """Distances; with positions inside the cache evicted tokens do not count."""
        behind = super().distances(queries, before)
        if self.positions == "cache":
            behind[:, : min(self.sinks, before)] -= self.dropped(before)
        return behind

    def dropped(self, before: int) -> int:
        """Number of evicted tokens."""
        return int((self.tier[0, :before] == EVICTED).sum())

    def logits(self, query: np.ndarray, before: int) -> np.ndarray:
        """Logits; those of sinks with positions inside the cache, as if evicted tokens had never been there."""
        logits, dropped = super().logits(query, before), self.dropped(before)
        if self.positions == "cache" and dropped:
            sinks = min(self.sinks, before)
            logits[:, :, :sinks] = super().logits(self.rotated(query, -dropped), before)[:, :, :sinks]
        return logits

    def rotated(self, x: np.ndarray, positions: int) -> np.ndarray:
        """Rotate the channel pairs (i, i + D/2) of `x` by `positions` x frequency i."""
        first, second = np.split(x, 2, -1)
        cos, sin = np.cos(positions * self.frequencies), np.sin(positions * self.frequencies)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def store(self, before: int) -> None:
        """Keep tokens by their positions alone."""
        position = np.arange(self.length)
        first, newest = position < self.sinks, position >= self.length - self.window
        for head in range(len(self.tier)):
            for tier, kept in enumerate((first, newest & ~first)):
                new = position[kept & (position >= before)]
                self.put(tier, head, new, self.keys[head, new][None], self.values[head, new][None])
            self.evict(head, position[~(first | newest) & (self.tier[head] != EVICTED)])


class TopK(LayerOracle):
    """Oracle eviction as in the papers' figures: all tokens are stored, and each query head uses its greatest logits alone."""

    def __init__(self, ratio: float = 0.2) -> None:
        super().__init__([16])
        self.ratio = ratio

    def chosen(self, logits: np.ndarray, before: int) -> np.ndarray:
        """The logits with -inf for all but the count(ratio, seen) greatest of a query; a prompt's queries use all."""
        if not before:
            return logits
        chosen = np.full_like(logits, -np.inf)
        for head, row in np.ndindex(logits.shape[:2]):
            seen, mine = before + row + 1, logits[head, row]
            wanted = count(self.ratio, min(seen, self.sliding or seen))
            order = np.argsort(-mine[:seen], kind="stable")
            chosen[head, row, order[:wanted]] = mine[order[:wanted]]
            if wanted < seen:
                self.margin = min(self.margin, mine[order[wanted - 1]] - mine[order[wanted]])
        return chosen

    def store(self, before: int) -> None:
        """Store all new tokens exactly."""
        new = np.arange(before, self.length)
        for head in range(len(self.tier)):
            self.put(0, head, new, self.keys[head, new][None], self.values[head, new][None])
