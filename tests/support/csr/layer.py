"""Float64 oracle of one row of one layer under CSR: when tokens are encoded, and attention over the decoded tokens."""

import math
from collections.abc import Sequence

import numpy as np
from csr.coder import Coder, Word
from csr.spec import Spec
from importance.chunks import ZipCache
from importance.layer import LayerOracle


class Coded(LayerOracle):
    """A layer whose tokens are encoded by dictionaries. After `settle` the oracle continues with the cache's own stored tokens.

    `words` are the encoded keys and values that have not been compared with the cache yet, by head and token.
    """

    spec: Spec
    coders: tuple[Coder, Coder]
    words: dict[tuple[int, int], tuple[Word, Word]]

    @property
    def sure(self) -> bool:
        """Whether float32 certainly gives the same dictionaries."""
        return all(coder.sure for coder in self.coders)

    def measure(self, stop: int) -> None:
        """Sample the row's online atoms from its first `stop` tokens."""
        for coder, tokens in zip(self.coders, (self.keys, self.values), strict=True):
            coder.measure(tokens[:, :stop])

    def spell(self, tier: int, head: int, tokens: np.ndarray) -> None:
        """Encode the tokens at positions `tokens [n]` of a head into a tier."""
        found = [
            coder.encode(held[head, tokens], tokens, tier)
            for coder, held in zip(self.coders, (self.keys, self.values), strict=True)
        ]
        self.tier[head, tokens] = tier
        for token, keys, values in zip(tokens, *found, strict=True):
            self.words[head, int(token)] = keys, values
            self.keys[head, token], self.values[head, token] = keys.approximation, values.approximation

    def settle(self, tier: int, head: int, keys: np.ndarray, values: np.ndarray) -> float:
        """Compare a head's stored tokens with the oracle's: the largest error in tolerances, infinity if the counts differ."""
        tokens, given = self.tokens(tier)[head], np.concatenate([keys, values], -1).astype(np.float64)
        if len(tokens) != len(given):
            return math.inf
        held = np.concatenate([self.keys[head, tokens], self.values[head, tokens]], -1)
        return self.adopt(head, tokens, given[self.matched(held, given)])

    def matched(self, held: np.ndarray, given: np.ndarray) -> np.ndarray:
        """The index in `given` of each token of `held [count, 2 D]`: here both are in the order of the tokens."""
        return np.arange(len(held))

    def adopt(self, head: int, tokens: np.ndarray, given: np.ndarray) -> float:
        """Replace the oracle's tokens by the cache's `given [n, 2 D]`; returns the largest error in tolerances, or infinity if a
        number is not finite.

        Tokens that were compared before must not have changed by more than 2^-20: they are decoded again, perhaps in other tiles.
        """
        worst, words = 0.0, [self.words.pop((head, int(token)), None) for token in tokens]
        shown = np.array([word is None for word in words], dtype=bool)
        for number, (held, found) in enumerate(zip((self.keys, self.values), np.split(given, 2, -1), strict=True)):
            before = held[head, tokens[shown]]
            still = 2.0**-20 * abs(before).max(-1, keepdims=True) + 1e-30
            worst = max(worst, float((abs(before - found[shown]) / still).max(initial=0)))
            errors = (word[number].error(x) for word, x in zip(words, found, strict=True) if word is not None)
            worst = max(worst, *errors, 0.0)
            held[head, tokens] = found
        return worst if np.isfinite(given).all() else np.inf


class CsrLayer(Coded):
    """CSR with a window of exact tokens; tokens that leave it are encoded a chunk at a time."""

    def __init__(self, spec: Spec, coders: tuple[Coder, Coder]) -> None:
        super().__init__([spec.pairs("keys")])
        self.spec, self.coders, self.words, self.encoded = spec, coders, {}, 0

    def store(self, before: int) -> None:
        """Encode every chunk that is complete and outside the window."""
        for start, stop in self.spec.spans(self.prompt, self.length):
            if start < self.encoded:
                continue
            if not start:
                self.measure(stop)
            for head in range(len(self.tier)):
                self.spell(0, head, np.arange(start, stop))
            self.encoded = stop


class CsrTiers(Coded, ZipCache):
    """CSR with ZipCache's saliency tiers: a tier has a number of pairs instead of bits; all share the first chunk's dictionary."""

    def __init__(self, spec: Spec, coders: tuple[Coder, Coder], layer: int) -> None:
        assert spec.tiers is not None
        given = {"probes": spec.probes, "probe_share": spec.probe_share, "layer": layer, "seed": spec.seed}
        ZipCache.__init__(self, spec.tiers, recompress=spec.block, refresh=False, **given)
        self.spec, self.coders, self.words = spec, coders, {}

    def store(self, before: int) -> None:
        """Sample the online atoms before the first chunk is encoded, then store as ZipCache does."""
        if not self.encoded and self.first() <= self.length:
            self.measure(self.first())
        super().store(before)

    def encode(self, tier: int, exact: np.ndarray, chosen: list[np.ndarray]) -> None:
        """Encode a tier's tokens of one chunk, `chosen` for each head."""
        for head, tokens in enumerate(chosen):
            self.spell(tier, head, tokens)

    def matched(self, held: np.ndarray, given: np.ndarray) -> np.ndarray:
        """The index in `given` of the token nearest to each of `held`; each must occur once, as tiers store tokens in any order."""
        found = abs(held[:, None] - given).mean(-1).argmin(1) if len(held) else np.zeros(0, dtype=int)
        assert len(set(found)) == len(found), "two tokens are nearest to one that is stored"
        return found


def layer_of(spec: Spec, layer: int, offline: Sequence[np.ndarray], frequencies: np.ndarray) -> CsrLayer | CsrTiers:
    """The oracle of one row of a layer; `offline` are the artifact's atoms of keys and of values, `[N, d]` each."""
    keys, values = (
        Coder(spec, stream, layer, atoms, frequencies)
        for stream, atoms in zip(("keys", "values"), offline, strict=True)
    )
    return CsrLayer(spec, (keys, values)) if spec.tiers is None else CsrTiers(spec, (keys, values), layer)
