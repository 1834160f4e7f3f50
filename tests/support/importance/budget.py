"""H2O and MiKV in float64: a budget of heavy and recent tokens."""

import math

import numpy as np
from importance.coding import (
    TOUCHED,
    halves,
    per_token,
)
from importance.draws import count
from importance.layer import WINDOW, LayerOracle


class HeavyHitterBudget(LayerOracle):
    """The newest tokens and the heavy hitters stay in the first tier, the others leave it.

    `kind` is what a token's score is: its attention `accumulated` over all queries since it came, that over their number
    (`normalised`), or that of the `last` query alone. With `shared` all KV heads have one score, the sum of theirs.
    """

    kind, shared = "accumulated", False

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
        """The plain sum of eq. 7 over every row since a token came, eq. 8's mean, or the last row."""
        self.sum = np.zeros((len(mass), 0)) if not before else self.sum
        self.sum = np.pad(self.sum, ((0, 0), (0, mass.shape[1]))) + mass.sum(1)
        rows = np.arange(self.length, 0, -1)  # of which each token was seen by those from its own on
        found = {"accumulated": self.sum, "normalised": self.sum / rows, "last": mass[:, -1]}[self.kind]
        self.saliency = found.sum(0, keepdims=True).repeat(len(found), 0) if self.shared else found

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


class H2O(HeavyHitterBudget):
    """arXiv:2306.14048: exact heavy hitters and exact recent tokens; the others are evicted."""

    def __init__(self, heavy: float | int = 0.2, recent: float | int = 0.2) -> None:
        super().__init__([16])
        self.parts = (heavy, recent)

    def budgets(self) -> tuple[int, int]:
        """Whole numbers are tokens, the others shares of the prompt."""
        heavy, recent = (part if isinstance(part, int) else count(part, self.prompt) for part in self.parts)
        return heavy, recent


class MiKV(HeavyHitterBudget):
    """arXiv:2402.18096: what H2O would evict is retained in few bits, behind keys balanced against their queries."""

    def __init__(
        self,
        ratio: float = 0.2,
        important: int | dict[str, int] = 16,
        retained: int | dict[str, int] = 2,
        balancer: bool | np.ndarray = True,
        group: int | None = None,
        budget: int | None = None,
        recent: int | None = None,
        clip: float = 1.0,
    ) -> None:
        """Options as the method's; a calibrated `balancer` is `[kv_heads, D]`."""
        both = (
            [bits["keys"], bits["values"]] if isinstance(bits, dict) else [bits] * 2 for bits in (important, retained)
        )
        super().__init__(list(both))
        self.ratio, self.balancer, self.group_size, self.clip = ratio, balancer, group, clip
        self.budget, self.recent = budget, recent

    def budgets(self) -> tuple[int, int]:
        """Half of the important tier each, the odd token recent."""
        budget = self.budget or max(1, math.ceil(self.ratio * self.prompt - 1e-9))
        recent = budget - budget // 2 if self.recent is None else min(budget, self.recent)
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
        self.quantise(0, head, tokens)

    def drop(self, head: int, tokens: np.ndarray) -> None:
        """Into the retained tier, from what is held of them: exact where they are new, decoded where they are not."""
        self.quantise(1, head, tokens)

    def quantise(self, tier: int, head: int, tokens: np.ndarray) -> None:
        """Keys as Q(k b) / b, eq. 3 and 4, values plainly; in 16 bits either is what it was."""
        found, group = [], self.group_size or self.keys.shape[2] // 2
        for held, b, bits in zip((self.keys, self.values), (self.balance[head], 1), self.bits[tier], strict=True):
            own = held[head, tokens]
            found.append(own[None] if bits == 16 else per_token(own * b, bits, group, self.clip) / b)
        self.put(tier, head, tokens, *found)
