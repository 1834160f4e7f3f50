"""Float64 oracle of ZipCache (arXiv:2405.14256)."""

from collections.abc import Sequence

import numpy as np
from importance.coding import channel_scale, channel_table, never_zero, own_channels, per_channel, per_token
from importance.draws import count, counter_hash, probe_rows
from importance.layer import LayerOracle


class ZipCache(LayerOracle):
    """ZipCache: the tokens of a chunk are scored by the chunk's probe rows, divided into tiers by saliency, and encoded once."""

    def __init__(
        self,
        tiers: Sequence[tuple[int, float]] = ((4, 0.6), (2, 0.4)),
        ratio: float | None = None,
        recompress: int = 100,
        probes: str = "random+recent",
        probe_share: float = 0.1,
        saliency: str = "normalised",
        clip: float = 1.0,
        value_scale: str = "shared",
        refresh: bool = True,
        scope: str = "head",
        salient_set: str = "head",
        layer: int = 0,
        seed: int = 0,
        ranges: tuple[np.ndarray, np.ndarray] | None = None,
        scale: np.ndarray | None = None,
    ) -> None:
        """Options of the method; `ranges` (low, high) and `scale`, `[kv_heads, D]` each, are calibrated statistics."""
        bits = [[own["keys"], own["values"]] if isinstance(own, dict) else [own, own] for own, _ in tiers]
        self.refresh, self.tiers = refresh and ranges is None, len(bits)
        # With `refresh`, blocks after the first chunk have their own ranges and scales, and are in further tiers.
        super().__init__([own if any(own) else 0 for own in (bits * 2 if self.refresh else bits)])
        self.shared, self.across = salient_set == "layer", scope == "layer"
        self.shares = [share for _, share in tiers] if ratio is None else [ratio, 1 - ratio]
        self.block, self.probes, self.share = recompress, probes, probe_share
        self.kind, self.clip, self.value_scale = saliency, clip, value_scale
        self.layer, self.seed, self.ranges, self.scale = layer, seed, ranges, scale
        self.encoded = 0
        self.tables: dict[tuple[int, int], tuple[list[np.ndarray], list[np.ndarray]]] = {}
        self.scales: dict[tuple[int, int], np.ndarray] = {}

    def hash(self, token: int) -> int:
        """The hash that draws a query row as a probe; the same for all KV heads."""
        return counter_hash(self.seed, self.layer, 0, token)

    def first(self) -> int:
        """Number of tokens of the first chunk."""
        return max(self.prompt, self.block)

    def bounds(self, token: int) -> tuple[int, int]:
        """The chunk (start, stop) of a token."""
        first, block = self.first(), self.block
        if token < first:
            return 0, first
        start = first + (token - first) // block * block
        return start, start + block

    def is_probe(self, token: int) -> bool:
        """Whether a query row is a probe."""
        if token < self.prompt and self.prompt >= self.block:
            return token in self.rows_of_prompt
        position, chance = token - self.bounds(token)[0] + 1, self.hash(token) / 2**32
        return {
            "all": True,
            "recent": position > self.block - count(self.share, self.block),
            "random": chance < self.share or position == self.block,
            "random+recent": position > self.block - count(self.share / 2, self.block) or chance < self.share / 2,
        }[self.probes]

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """Add attention of the forward's probe rows to the sums and counts of eq. 7-9."""
        if not before:
            self.rows_of_prompt: set[int] = set()
            if self.prompt >= self.block:
                self.rows_of_prompt = probe_rows(self.probes, self.share, self.prompt, self.hash)
            self.sums, self.seen = np.zeros((len(mass), 0)), np.zeros(0, dtype=int)
        new = mass.shape[1]
        self.sums, self.seen = np.pad(self.sums, ((0, 0), (0, new))), np.pad(self.seen, (0, new))
        for row in filter(self.is_probe, range(before, before + new)):
            mine = slice(self.bounds(row)[0], row + 1)
            self.sums[:, mine] += mass[:, row - before, mine]
            self.seen[mine] += 1

    def store(self, before: int) -> None:
        """Encode every chunk whose last token is there."""
        while self.bounds(self.encoded)[1] <= self.length:
            start, stop = self.bounds(self.encoded)
            sums, seen = self.sums[:, start:stop], self.seen[start:stop]
            self.saliency = sums / np.maximum(seen, 1) if self.kind == "normalised" else sums  # eq. 8 or eq. 7
            if self.shared:
                self.saliency = self.saliency.sum(0, keepdims=True).repeat(len(self.saliency), 0)
            first = self.coded_from(start)
            exact, self.saliency = self.values[:, first:stop].copy(), self.saliency[:, first - start :]
            for tier, chosen in self.chosen_tokens(first):
                self.encode(tier, exact, chosen)
            self.encoded = stop

    def coded_from(self, start: int) -> int:
        """The first token of a chunk that is encoded."""
        return start

    def chosen_tokens(self, start: int) -> list[tuple[int, list[np.ndarray]]]:
        """The non-empty tiers of a chunk that starts at `start`: a tier's number, and each head's tokens in rising order."""
        found, taken, size = [], 0, self.saliency.shape[1]
        for number, share in enumerate(self.shares):
            last = number == self.tiers - 1
            stop = size if last else min(size, taken + count(share, size))
            chosen = [np.sort(self.greatest(saliency, stop)[taken:]) + start for saliency in self.saliency]
            tier = number + self.tiers * (self.refresh and start >= self.first())
            found, taken = [*found, (tier, chosen)] if stop > taken else found, stop
        return found

    def encode(self, tier: int, exact: np.ndarray, chosen: list[np.ndarray]) -> None:
        """Encode a tier's tokens of one chunk, whose exact values are `exact [kv_heads, n, D]`."""
        if not self.bits[tier]:
            for head, tokens in enumerate(chosen):
                self.evict(head, tokens)
            return
        (of_keys, of_values), own = self.bits[tier], tier >= self.tiers
        found = [[] for _ in chosen]
        for scales in zip(*self.scales_of(tier, exact, chosen), strict=True):
            for head, coded in enumerate(self.coded_values(of_values, chosen, scales)):
                found[head].append(coded)
        for head, (tokens, values) in enumerate(zip(chosen, found, strict=True)):
            keys = self.keys[head, tokens]
            if of_keys == 16:
                coded = keys[None]
            elif own:
                coded = own_channels(keys, of_keys, self.clip)
            else:
                coded = per_channel(keys, of_keys, self.tables[tier, head], self.clip)
            self.put(tier, head, tokens, coded, np.concatenate(values))

    def scales_of(self, tier: int, exact: np.ndarray, chosen: list[np.ndarray]) -> list[list[np.ndarray]]:
        """For each head, the channel scales by which its values are divided: all numbers that float32 may store."""
        found = []
        for head, tokens in enumerate(chosen):
            values = self.values[head, tokens] if self.value_scale == "tier" else exact[head]
            if tier >= self.tiers:
                found.append(channel_scale(values))
                continue
            if (tier, head) not in self.tables:
                self.measure(tier, head, self.keys[head, tokens], values)
            found.append([self.scales[tier, head]])
        return found

    def coded_values(self, bits: int, chosen: list[np.ndarray], scales: list[np.ndarray]) -> list[np.ndarray]:
        """For each head, all values `[choices, n, D]` to which its tokens may be decoded (eq. 6). A scale and a zero point belong
        to a token of one head or, with scope "layer", of all heads, which then have the same tokens."""
        if bits == 16:
            return [self.values[head, tokens][None] for head, tokens in enumerate(chosen)]
        width = self.values.shape[2]
        scaled = [
            self.values[head, tokens] / np.where(scale > 0, scale, 1)
            for head, (tokens, scale) in enumerate(zip(chosen, scales, strict=True))
        ]
        if self.across:
            together = per_token(np.concatenate(scaled, -1), bits, width * len(scaled), self.clip)
            coded = np.split(together, len(scaled), -1)
        else:
            coded = [per_token(values, bits, width, self.clip) for values in scaled]
        return [part * scale for part, scale in zip(coded, scales, strict=True)]

    def measure(self, tier: int, head: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Set a tier's ranges and scales, from its first chunk or from the artifact; they are kept for later chunks."""
        self.tables[tier, head] = channel_table(keys)
        if self.ranges is not None:
            low, high = (np.asarray(end[head], dtype=np.float64) for end in self.ranges)
            self.tables[tier, head] = [(high + low) / 2], [(high - low) / 2]
        if self.scale is not None:
            self.scales[tier, head] = np.asarray(self.scale[head], dtype=np.float64)
        else:
            scale = self.sure(*channel_scale(values))
            self.scales[tier, head] = scale if self.refresh else never_zero(scale)
