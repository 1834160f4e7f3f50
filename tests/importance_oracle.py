"""The importance methods worked out another way: float64, one layer, one row, from the papers' equations alone.

Every method keeps all tokens of the row side by side: what is attended for each of them (exact, decoded, or nothing), and
the tier it lies in. Nothing is packed and nothing is ever forgotten, so that a step is one softmax over everything.

Where float32 could have decided otherwise, the oracle says so instead of guessing: `margin` is the smallest gap of a
selection, and a token whose parameters or codes lie on a border keeps its alternatives in `pending` until `settle` is
shown which of them was stored.
"""

import math
from collections.abc import Sequence

import numpy as np

WINDOW, EVICTED = -1, -2  # tiers that store nothing: exact tokens that wait, and tokens that are gone
WORD = 2**32 - 1

# Relative rounding of a value that one float32 operation has touched, or a few, and of a code computed from those.
ROUNDED, TOUCHED, CODED = 2**-23, 2**-21, 2**-20


def fmix32(x: int) -> int:
    """The finaliser of MurmurHash3: every bit of x reaches every bit of the answer."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def counter_hash(seed: int, layer: int, head: int, place: int) -> int:
    """32 bits of (seed, layer, head, token): a draw that no other row or order of evaluation can move."""
    h = 0
    for number, word in enumerate((seed & WORD, seed >> 32 & WORD, layer, head, place)):
        if number:
            h = h * 5 + 0xE6546B64 & WORD
        h = fmix32(h ^ word)
    return h


def count(share: float, tokens: int) -> int:
    """How many of `tokens` a share is: rounded down, at least one."""
    return max(1, math.floor(share * tokens + 1e-9)) if share > 0 else 0


# --- what a codec may store -----------------------------------------------------------------------------------------


def halves(y: np.ndarray, error: np.ndarray) -> list[np.ndarray]:
    """y in float16, and the neighbour that y with an error would have become (the same one almost always)."""
    near, low, high = (np.float16(value).astype(np.float64) for value in (y, y - error, y + error))
    return [near, np.where(low != near, low, high)]


def decodings(x: np.ndarray, parameters: Sequence[tuple[np.ndarray, np.ndarray]], bits: int) -> np.ndarray:
    """All that x may be decoded to, `[choices, *x.shape]`, the exact arithmetic's own answer first.

    `parameters`: pairs of scale and zero point as stored; the first is the right one, the others are its neighbours.
    """
    found = []
    for scale, zero in parameters:
        safe = np.where(scale > 0, scale, 1)
        place = np.where(scale > 0, (x - zero) / safe, 0) + 0.5
        doubt = CODED * ((abs(x) + abs(zero)) / safe + 2**bits)
        found += [np.clip(np.floor(place + sign * doubt), 0, 2**bits - 1) * scale + zero for sign in (0, -1, 1)]
    return np.stack(found)


def per_token(x: np.ndarray, bits: int, group: int, clip: float) -> np.ndarray:
    """Groups (1, group) of `x [n, D]`, scale and zero point of each in float16 -> `[choices, n, D]`."""
    parts = x.reshape(len(x), x.shape[1] // group, group)
    high, low, error = parts.max(-1), parts.min(-1), TOUCHED * abs(parts).max(-1)
    half, levels = clip * (high - low) / 2, 2**bits - 1
    scales = halves(2 * half / levels, 2 * error / levels)
    zeros = halves((high + low) / 2 - half, 2 * error)
    return decodings(x, [(s.repeat(group, -1), z.repeat(group, -1)) for s in scales for z in zeros], bits)


def per_channel(x: np.ndarray, bits: int, table: tuple[list[np.ndarray], list[np.ndarray]], clip: float) -> np.ndarray:
    """Channels of `x [n, D]` in ranges centre +- clip * half that were measured before -> `[choices, n, D]`."""
    centres, reaches = table
    ranges = [(centre, clip * half) for half in reaches for centre in centres]
    return decodings(x, [(2 * half / (2**bits - 1), centre - half) for centre, half in ranges], bits)


def channel_table(x: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Centre and half range of every channel of `x [n, D]`, in float16, each with its neighbour."""
    high, low, error = x.max(0), x.min(0), TOUCHED * abs(x).max(0)
    return halves((high + low) / 2, error), halves((high - low) / 2, error)


def channel_scale(x: np.ndarray) -> list[np.ndarray]:
    """ZipCache eq. 6: c = sqrt(max_t |x|) of `x [n, D]` in float16, 1 for a channel that is always 0; and its neighbour."""
    scale = np.sqrt(abs(x).max(0))
    scale = np.where(scale > 0, scale, 1)
    return halves(scale, ROUNDED * scale)


# --- what all methods share -----------------------------------------------------------------------------------------


class LayerOracle:
    """One row of one layer: what it holds, and exact attention over that.

    After a forward: `tokens(tier)` and `decoded(tier)` are the tiers, `tokens(WINDOW)` the exact tokens that wait,
    `saliency` the scores of the last selection (`[kv_heads, tokens it chose from]`), `margin` the smallest relative gap
    between a selected and a refused score so far (of logits, their difference); 0 where a shared table was in doubt.
    """

    def __init__(self, bits: Sequence[int]) -> None:
        self.bits, self.prompt, self.margin = tuple(bits), 0, math.inf
        self.saliency: np.ndarray | None = None
        self.pending: dict[tuple[int, int], np.ndarray] = {}

    def forward(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """`query [heads, n, D]`, `keys`, `values [kv_heads, n, D]` -> `[heads, n, D]`; then stores the new tokens."""
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
        """Tokens of the row so far, whatever became of them."""
        return self.tier.shape[1]

    def attend(self, query: np.ndarray, before: int) -> np.ndarray:
        """Probabilities `[heads, n, tokens]` of the queries at `before`, `before` + 1, ... on everything not evicted."""
        logits = self.logits(query, before)
        unseen = np.arange(self.length) > before + np.arange(query.shape[1])[:, None]
        logits[unseen | (self.tier == EVICTED).repeat(self.group, 0)[:, None]] = -np.inf
        weights = np.exp(self.chosen(logits, before) - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def logits(self, query: np.ndarray, before: int) -> np.ndarray:
        """q.k / sqrt(D)."""
        return query @ self.keys.repeat(self.group, 0).swapaxes(1, 2) / math.sqrt(query.shape[2])

    def chosen(self, logits: np.ndarray, before: int) -> np.ndarray:
        """The logits that take part in the softmax."""
        return logits

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """What a forward tells of its tokens; `mass [kv_heads, n, tokens]` are probabilities summed over the group."""

    def store(self, before: int) -> None:
        """Moves tokens between tiers."""

    def greatest(self, scores: np.ndarray, wanted: int) -> np.ndarray:
        """Places of the `wanted` greatest of `scores [n]`, ties to the earlier; notes how narrow the decision was."""
        order = np.argsort(-scores, kind="stable")
        if 0 < wanted < len(scores):
            last, first = scores[order[wanted - 1]], scores[order[wanted]]
            if last or first:  # two zeros are no measurement: both are sums of nothing
                self.margin = min(self.margin, (last - first) / last)
        return order[:wanted]

    def sure(self, near: np.ndarray, other: np.ndarray) -> np.ndarray:
        """A table that all tokens of a channel share; no margin is left where float32 may have stored its neighbour."""
        if (near != other).any():
            self.margin = 0.0
        return near

    def put(self, tier: int, head: int, tokens: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Stores `tokens [n]` of a head in a tier as one of `keys`, `values [choices, n, D]`; the first, for now."""
        self.tier[head, tokens] = tier
        self.keys[head, tokens], self.values[head, tokens] = keys[0], values[0]
        choices = max(len(keys), len(values))
        both = np.concatenate([np.resize(part, (choices, *part.shape[1:])) for part in (keys, values)], -1)
        self.pending.update({(head, int(token)): both[:, column] for column, token in enumerate(tokens)})

    def evict(self, head: int, tokens: np.ndarray) -> None:
        """Forgets `tokens [n]` of a head; what they held must not matter any more."""
        self.tier[head, tokens] = EVICTED
        self.keys[head, tokens] = self.values[head, tokens] = 0

    def tokens(self, tier: int) -> list[np.ndarray]:
        """Token numbers of a tier for each KV head, rising."""
        return [np.flatnonzero(held == tier) for held in self.tier]

    def decoded(self, tier: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values `[count, D]` of a tier as attended, for each KV head, in the order of `tokens`."""
        return [(self.keys[h, held], self.values[h, held]) for h, held in enumerate(self.tokens(tier))]

    def settle(self, tier: int, head: int, keys: np.ndarray, values: np.ndarray) -> float:
        """Takes over what a cache has stored in a tier, in whatever order, if it is this tier.

        `keys`, `values [count, D]`. Returns the largest error against what each token may be decoded to; infinite unless
        each token of the tier is the nearest to exactly one of those given. A token that has been settled has one choice.
        """
        tokens, given = self.tokens(tier)[head], np.concatenate([keys, values], -1).astype(np.float64)
        if len(tokens) != len(given):
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


# --- the methods ----------------------------------------------------------------------------------------------------


class ZipCache(LayerOracle):
    """arXiv:2405.14256: chunks scored by their own probe rows, cut into tiers by saliency, encoded once."""

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
        layer: int = 0,
        seed: int = 0,
        ranges: tuple[np.ndarray, np.ndarray] | None = None,
        scale: np.ndarray | None = None,
    ) -> None:
        """Options as the method's; `ranges` (low, high) and `scale`, `[kv_heads, D]`, are calibrated statistics."""
        super().__init__([bits for bits, _ in tiers])
        self.shares = [share for _, share in tiers] if ratio is None else [ratio, 1 - ratio]
        self.block, self.probes, self.share = recompress, probes, probe_share
        self.kind, self.clip, self.value_scale = saliency, clip, value_scale
        self.layer, self.seed, self.ranges, self.scale = layer, seed, ranges, scale
        self.encoded = 0
        self.tables: dict[tuple[int, int], tuple[list[np.ndarray], list[np.ndarray]]] = {}
        self.scales: dict[tuple[int, int], np.ndarray] = {}

    def hash(self, token: int) -> int:
        """The draw of a query row; probe rows are shared by the KV heads."""
        return counter_hash(self.seed, self.layer, 0, token)

    def first(self) -> int:
        """Tokens of the first chunk."""
        return max(self.prompt, self.block)

    def bounds(self, token: int) -> tuple[int, int]:
        """The chunk that a token lies in."""
        first, block = self.first(), self.block
        if token < first:
            return 0, first
        start = first + (token - first) // block * block
        return start, start + block

    def probe_rows(self) -> set[int]:
        """Probe rows of a prompt that is a chunk."""
        total, whole, half = self.prompt, count(self.share, self.prompt), count(self.share / 2, self.prompt)
        return {
            "all": set(range(total)),
            "recent": set(range(total - whole, total)),
            "random": self.drawn(total, whole),
            "random+recent": set(range(total - half, total)) | self.drawn(total - half, half),
        }[self.probes]

    def drawn(self, tokens: int, wanted: int) -> set[int]:
        """The `wanted` of the first `tokens` rows whose hash is least."""
        return set(sorted(range(tokens), key=lambda token: (self.hash(token), token))[:wanted])

    def is_probe(self, token: int) -> bool:
        """Whether a query row is scored."""
        if token < self.prompt and self.prompt >= self.block:
            return token in self.rows_of_prompt
        place, chance = token - self.bounds(token)[0] + 1, self.hash(token) / 2**32
        return {
            "all": True,
            "recent": place > self.block - count(self.share, self.block),
            "random": chance < self.share or place == self.block,
            "random+recent": place > self.block - count(self.share / 2, self.block) or chance < self.share / 2,
        }[self.probes]

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """The sums and counts of eq. 7-9 over the probe rows."""
        if not before:
            self.rows_of_prompt = self.probe_rows() if self.prompt >= self.block else set()
            self.sums, self.seen = np.zeros((len(mass), 0)), np.zeros(0, dtype=int)
        new = mass.shape[1]
        self.sums, self.seen = np.pad(self.sums, ((0, 0), (0, new))), np.pad(self.seen, (0, new))
        for row in filter(self.is_probe, range(before, before + new)):
            mine = slice(self.bounds(row)[0], row + 1)
            self.sums[:, mine] += mass[:, row - before, mine]
            self.seen[mine] += 1

    def store(self, before: int) -> None:
        """Encodes every chunk whose last token has come."""
        while self.bounds(self.encoded)[1] <= self.length:
            start, stop = self.bounds(self.encoded)
            sums, seen = self.sums[:, start:stop], self.seen[start:stop]
            self.saliency = sums / np.maximum(seen, 1) if self.kind == "normalised" else sums  # eq. 8 or eq. 7
            for head, saliency in enumerate(self.saliency):
                self.encode(head, start, saliency)
            self.encoded = stop

    def encode(self, head: int, start: int, saliency: np.ndarray) -> None:
        """One chunk of one head."""
        exact, taken = self.values[head, start : start + len(saliency)].copy(), 0
        for tier, (bits, share) in enumerate(zip(self.bits, self.shares, strict=True)):
            last = tier == len(self.bits) - 1
            stop = len(saliency) if last else min(len(saliency), taken + count(share, len(saliency)))
            tokens = np.sort(self.greatest(saliency, stop)[taken:]) + start
            taken = stop
            if bits == 0:
                self.evict(head, tokens)
                continue
            keys, values = self.keys[head, tokens], self.values[head, tokens]
            if bits == 16:
                self.put(tier, head, tokens, keys[None], values[None])
                continue
            if not start:
                self.measure(tier, head, keys, values if self.value_scale == "tier" else exact)
            scale = self.scales[tier, head]
            key_choices = per_channel(keys, bits, self.tables[tier, head], self.clip)
            value_choices = per_token(values / scale, bits, values.shape[1], self.clip) * scale  # eq. 6
            self.put(tier, head, tokens, key_choices, value_choices)

    def measure(self, tier: int, head: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Tables of a tier from the first chunk, or from the artifact; for good."""
        self.tables[tier, head] = channel_table(keys)
        if self.ranges is not None:
            low, high = (np.asarray(end[head], dtype=np.float64) for end in self.ranges)
            self.tables[tier, head] = [(high + low) / 2], [(high - low) / 2]
        if self.scale is not None:
            self.scales[tier, head] = np.asarray(self.scale[head], dtype=np.float64)
        else:
            self.scales[tier, head] = self.sure(*channel_scale(values))


class HeavyRecent(LayerOracle):
    """Accumulated attention: the newest tokens and the heavy hitters stay in the first tier, the others leave it."""

    def budgets(self) -> tuple[int, int]:
        """Tokens of the first tier: heavy, recent."""
        raise NotImplementedError

    def keep(self, head: int, tokens: np.ndarray) -> None:
        """New tokens that stay."""
        self.put(0, head, tokens, self.keys[head, tokens][None], self.values[head, tokens][None])

    def drop(self, head: int, tokens: np.ndarray) -> None:
        """Tokens, new or held, that leave or never enter."""
        self.evict(head, tokens)

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """The plain sum of eq. 7 over every row since a token came."""
        self.saliency = np.zeros((len(mass), 0)) if not before else self.saliency
        self.saliency = np.pad(self.saliency, ((0, 0), (0, mass.shape[1]))) + mass.sum(1)

    def store(self, before: int) -> None:
        """Who stays is decided among those that stayed so far and the new ones."""
        heavy, recent = self.budgets()
        newest = self.length - min(recent, self.length)
        for head in range(len(self.tier)):
            older = np.flatnonzero((self.tier[head, :newest] == 0) | (self.tier[head, :newest] == WINDOW))
            kept = older[self.greatest(self.saliency[head, older], heavy)]
            stay = np.union1d(kept, np.arange(newest, self.length))
            self.drop(head, np.setdiff1d(older, kept))
            self.keep(head, stay[stay >= before])


class H2O(HeavyRecent):
    """arXiv:2306.14048: exact heavy hitters and exact recent tokens; the others are evicted."""

    def __init__(self, heavy: float | int = 0.2, recent: float | int = 0.2) -> None:
        super().__init__([16])
        self.parts = (heavy, recent)

    def budgets(self) -> tuple[int, int]:
        """Whole numbers are tokens, the others shares of the prompt."""
        heavy, recent = (part if isinstance(part, int) else count(part, self.prompt) for part in self.parts)
        return heavy, recent


class MiKV(HeavyRecent):
    """arXiv:2402.18096: what H2O would evict is retained in few bits, behind keys balanced against their queries."""

    def __init__(
        self,
        ratio: float = 0.2,
        important: int = 16,
        retained: int = 2,
        balancer: bool | np.ndarray = True,
        group: int | None = None,
        budget: int | None = None,
        recent: int | None = None,
        clip: float = 1.0,
    ) -> None:
        """Options as the method's; a calibrated `balancer` is `[kv_heads, D]`."""
        super().__init__([important, retained])
        self.ratio, self.balancer, self.group_size, self.clip = ratio, balancer, group, clip
        self.budget, self.recent = budget, recent

    def budgets(self) -> tuple[int, int]:
        """Half of the important tier each, the odd token recent."""
        budget = self.budget or max(1, math.ceil(self.ratio * self.prompt - 1e-9))
        recent = budget - budget // 2 if self.recent is None else self.recent
        return budget - recent, recent

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """Also the balancer, once."""
        super().observe(query, mass, before)
        if not before:
            self.balance = self.measured(query)

    def measured(self, query: np.ndarray) -> np.ndarray:
        """b of eq. 2, `[kv_heads, D]`: sqrt(max |q| / max |k|) over the prompt, in float16."""
        if not isinstance(self.balancer, bool):
            return np.asarray(self.balancer, dtype=np.float64)
        queries = abs(query).max(1).reshape(len(self.keys), self.group, -1).max(1)
        keys = abs(self.keys).max(1)
        if not self.balancer:
            return np.ones_like(keys)
        known = (queries > 0) & (keys > 0)
        b = np.sqrt(np.where(known, queries, 1) / np.where(known, keys, 1))
        return self.sure(*halves(b, TOUCHED * b))

    def keep(self, head: int, tokens: np.ndarray) -> None:
        """Into the important tier."""
        super().keep(head, tokens) if self.bits[0] == 16 else self.quantise(0, head, tokens)

    def drop(self, head: int, tokens: np.ndarray) -> None:
        """Into the retained tier, from what is held of them: exact where they are new, decoded where they are not."""
        self.quantise(1, head, tokens)

    def quantise(self, tier: int, head: int, tokens: np.ndarray) -> None:
        """Keys as Q(k b) / b, eq. 3 and 4, values plainly."""
        b, bits = self.balance[head], self.bits[tier]
        group = self.group_size or self.keys.shape[2] // 2
        keys = per_token(self.keys[head, tokens] * b, bits, group, self.clip) / b
        self.put(tier, head, tokens, keys, per_token(self.values[head, tokens], bits, group, self.clip))


class StreamingLLM(LayerOracle):
    """arXiv:2309.17453: the first tokens (one tier) and the newest of the others (another), exact."""

    def __init__(
        self, sinks: int = 4, window: int = 1020, positions: str = "cache", frequencies: np.ndarray | None = None
    ) -> None:
        """`frequencies [D / 2]`: the model's inverse frequencies, needed for positions inside the cache."""
        super().__init__([16, 16])
        self.sinks, self.window, self.positions = sinks, window, positions
        self.frequencies = None if frequencies is None else np.asarray(frequencies, dtype=np.float64)

    def logits(self, query: np.ndarray, before: int) -> np.ndarray:
        """Sinks are met from where the query would stand had the evicted tokens never been."""
        logits = super().logits(query, before)
        dropped = int((self.tier[0, :before] == EVICTED).sum())
        if self.positions == "cache" and dropped:
            sinks = min(self.sinks, before)
            logits[:, :, :sinks] = super().logits(self.turned(query, -dropped), before)[:, :, :sinks]
        return logits

    def turned(self, x: np.ndarray, places: int) -> np.ndarray:
        """RoPE by `places` more positions: channel pairs (i, i + D/2) turn by places * frequency i."""
        first, second = np.split(x, 2, -1)
        cos, sin = np.cos(places * self.frequencies), np.sin(places * self.frequencies)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def store(self, before: int) -> None:
        """No score: place alone."""
        place = np.arange(self.length)
        first, newest = place < self.sinks, place >= self.length - self.window
        for head in range(len(self.tier)):
            for tier, kept in enumerate((first, newest & ~first)):
                new = place[kept & (place >= before)]
                self.put(tier, head, new, self.keys[head, new][None], self.values[head, new][None])
            self.evict(head, place[~(first | newest) & (self.tier[head] != EVICTED)])


class TopK(LayerOracle):
    """The oracle eviction of the papers' figures: everything is there, each query head uses its greatest logits."""

    def __init__(self, ratio: float = 0.2) -> None:
        super().__init__([16])
        self.ratio = ratio

    def chosen(self, logits: np.ndarray, before: int) -> np.ndarray:
        """-inf for all but count(ratio, seen) of the logits of a row; a prompt attends to all it sees."""
        if not before:
            return logits
        chosen = np.full_like(logits, -np.inf)
        for head, row in np.ndindex(logits.shape[:2]):
            seen, mine = before + row + 1, logits[head, row]
            wanted = count(self.ratio, seen)
            order = np.argsort(-mine[:seen], kind="stable")
            chosen[head, row, order[:wanted]] = mine[order[:wanted]]
            if wanted < seen:
                self.margin = min(self.margin, mine[order[wanted - 1]] - mine[order[wanted]])
        return chosen

    def store(self, before: int) -> None:
        """Everything, exact."""
        new = np.arange(before, self.length)
        for head in range(len(self.tier)):
            self.put(0, head, new, self.keys[head, new][None], self.values[head, new][None])


ORACLES = {"zipcache": ZipCache, "mikv": MiKV, "h2o": H2O, "streaming_llm": StreamingLLM, "oracle": TopK}
