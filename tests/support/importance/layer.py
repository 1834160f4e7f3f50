"""Float64 oracle of the importance methods for one row of one layer, from the papers' equations alone.

All tokens of the row are kept in order, each with the key and value that attention uses (exact or decoded) and its tier; evicted
tokens are masked. Nothing is packed, so a step is one softmax over all tokens.

Decisions that float32 may make differently are reported: `margin` is the smallest gap of a selection so far, and a token whose
parameters or codes may be rounded to either side keeps all its decoded values in `pending`, until `settle` gets the stored one.
"""

import math
from collections.abc import Sequence

import numpy as np

WINDOW, EVICTED = -1, -2  # numbers instead of a tier: exact tokens that are not in a tier yet, and evicted tokens


class LayerOracle:
    """One row of one layer: its tokens, and exact attention over them.

    After a forward: `tokens(tier)` and `decoded(tier)` are the tiers, `tokens(WINDOW)` the exact tokens outside tiers, `saliency`
    the scores of the last selection (`[kv_heads, tokens it chose from]`), and `margin` the smallest relative gap between a selected
    and a refused score so far (of logits, their difference), 0 if a table shared by tokens may be rounded differently. The model's
    `logit_scale` (None: D^-1/2), `softcap` and `sliding` window in tokens may be set before the first forward.
    """

    logit_scale: float | None = None
    softcap: float | None = None
    sliding: int | None = None

    def __init__(self, bits: Sequence[int]) -> None:
        self.bits, self.prompt, self.margin = tuple(bits), 0, math.inf
        self.saliency: np.ndarray | None = None
        self.pending: dict[tuple[int, int], np.ndarray] = {}

    def forward(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Outputs `[heads, n, D]` of `query [heads, n, D]`, `keys`, `values [kv_heads, n, D]`; then stores the new tokens."""
        query, keys, values = (np.asarray(part, dtype=np.float64) for part in (query, keys, values))
        if not self.prompt:
            self.prompt, self.group = keys.shape[1], len(query) // len(keys)
            self.keys, self.values = keys[:, :0], values[:, :0]
            self.tier = np.zeros((len(keys), 0), dtype=int)
        before = self.length
        self.keys, self.values = np.concatenate([self.keys, keys], 1), np.concatenate([self.values, values], 1)
        self.tier = np.pad(self.tier, ((0, 0), (0, keys.shape[1])), constant_values=WINDOW)
        probabilities = self.attend(query, before)
        output = probabilities @ self.values.repeat(self.group, 0)
        self.observe(query, probabilities.reshape(len(keys), self.group, *probabilities.shape[1:]).sum(1), before)
        self.store(before)
        return output

    @property
    def length(self) -> int:
        """Number of tokens of the row so far, evicted ones included."""
        return self.tier.shape[1]

    def attend(self, query: np.ndarray, before: int) -> np.ndarray:
        """Attention probabilities `[heads, n, tokens]` of the queries from position `before` on, over all tokens that are neither
        evicted nor outside the sliding window."""
        logits = self.logits(query, before)
        behind = self.distances(query.shape[1], before)
        unseen = (behind < 0) | (behind >= (self.sliding or self.length))
        logits[unseen | (self.tier == EVICTED).repeat(self.group, 0)[:, None]] = -np.inf
        weights = np.exp(self.chosen(logits, before) - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def distances(self, queries: int, before: int) -> np.ndarray:
        """How many positions each token, `[queries, tokens]`, is before each query."""
        return before + np.arange(queries)[:, None] - np.arange(self.length)

    def logits(self, query: np.ndarray, before: int) -> np.ndarray:
        """q.k times the scale, soft-capped if `softcap` is set."""
        scale = query.shape[2] ** -0.5 if self.logit_scale is None else self.logit_scale
        logits = query @ self.keys.repeat(self.group, 0).swapaxes(1, 2) * scale
        return logits if self.softcap is None else np.tanh(logits / self.softcap) * self.softcap

    def chosen(self, logits: np.ndarray, before: int) -> np.ndarray:
        """The logits with -inf for tokens that the method leaves out of the softmax; here none."""
        return logits

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """Update scores from a forward; `mass [kv_heads, n, tokens]` are probabilities summed over the query heads of a KV head."""

    def store(self, before: int) -> None:
        """Move tokens between tiers after a forward whose first new token is at `before`."""

    def greatest(self, scores: np.ndarray, wanted: int) -> np.ndarray:
        """Indices of the `wanted` greatest of `scores [n]`, of equal ones the earlier; updates `margin`."""
        order = np.argsort(-scores, kind="stable")
        if 0 < wanted < len(scores):
            last, first = scores[order[wanted - 1]], scores[order[wanted]]
            if last or first:  # two scores of 0 are exact ties, not rounding
                self.margin = min(self.margin, (last - first) / last)
        return order[:wanted]

    def sure(self, near: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return a table `near` that many tokens share; sets `margin` to 0 if float32 may have stored the `other` one."""
        if (near != other).any():
            self.margin = 0.0
        return near

    def put(self, tier: int, head: int, tokens: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Store `tokens [n]` of a head in a tier as the first of `keys`, `values [choices, n, D]`; all choices stay `pending`."""
        self.tier[head, tokens] = tier
        self.keys[head, tokens], self.values[head, tokens] = keys[0], values[0]
        choices = max(len(keys), len(values))
        both = np.concatenate([np.resize(part, (choices, *part.shape[1:])) for part in (keys, values)], -1)
        self.pending.update({(head, int(token)): both[:, column] for column, token in enumerate(tokens)})

    def evict(self, head: int, tokens: np.ndarray) -> None:
        """Evict `tokens [n]` of a head; their keys and values become 0."""
        self.tier[head, tokens] = EVICTED
        self.keys[head, tokens] = self.values[head, tokens] = 0

    def tokens(self, tier: int) -> list[np.ndarray]:
        """Positions of a tier's tokens for each KV head, rising."""
        return [np.flatnonzero(held == tier) for held in self.tier]

    def decoded(self, tier: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The keys and values `[count, D]` of a tier that attention uses, for each KV head, in the order of `tokens`."""
        return [(self.keys[h, held], self.values[h, held]) for h, held in enumerate(self.tokens(tier))]

    def settle(self, tier: int, head: int, keys: np.ndarray, values: np.ndarray) -> float:
        """Replace a head's tokens of a tier by those that a cache has decoded, `keys` and `values [count, D]` in any order.

        Returns the largest error of a token from the nearest of its pending choices; infinity if the counts differ, a number is not
        finite, or two tokens of the tier have the same nearest given one. A token that was settled before has one choice.
        """
        tokens, given = self.tokens(tier)[head], np.concatenate([keys, values], -1).astype(np.float64)
        if len(tokens) != len(given) or not np.isfinite(given).all():
            return math.inf
        held = np.concatenate([self.keys[head, tokens], self.values[head, tokens]], -1)
        match = abs(held[:, None] - given).mean(-1).argmin(1) if len(held) else np.zeros(0, dtype=int)
        if len(set(match)) < len(match):
            return math.inf
        worst = 0.0
        for token, mine, stored in zip(tokens, held, given[match], strict=True):
            choices = self.pending.pop((head, int(token)), mine[None])
            worst = max(worst, abs(choices - stored).min(0).max())
            self.keys[head, token], self.values[head, token] = np.split(stored, 2)
        return worst
