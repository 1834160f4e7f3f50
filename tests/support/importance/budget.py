"""Float64 oracles of H2O and MiKV: a budget of heavy hitters and recent tokens."""

import math

import numpy as np
from importance.coding import (
    TOUCHED,
    halves,
    per_channel,
    per_token,
)
from importance.draws import count
from importance.layer import WINDOW, LayerOracle
from importance.policies import Policy


class HeavyHitterBudget(LayerOracle):
    """The newest tokens and the heavy hitters stay in the first tier; all others leave it.

    `policy` computes the scores. With `shared` the score of a token is the sum over KV heads, so all heads keep the same tokens.
    """

    policy: Policy
    shared = False

    def parts(self) -> tuple[int, int]:
        """Numbers of heavy and of recent tokens in the first tier."""
        raise NotImplementedError

    def budgets(self) -> tuple[int, int]:
        """`parts`; under the policy "local" all are recent."""
        heavy, recent = self.parts()
        return (0, heavy + recent) if self.policy.name == "local" else (heavy, recent)

    def keep(self, head: int, tokens: np.ndarray) -> None:
        """Put new tokens `tokens [n]` of a head into the first tier, exactly."""
        self.put(0, head, tokens, self.keys[head, tokens][None], self.values[head, tokens][None])

    def drop(self, head: int, tokens: np.ndarray) -> None:
        """Evict tokens `tokens [n]` of a head, new ones or ones of the first tier."""
        self.evict(head, tokens)

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """Set `saliency` to the policy's scores."""
        found = self.policy.observe(mass, before, *self.budgets())
        self.margin = min(self.margin, self.policy.margin)
        self.saliency = found.sum(0, keepdims=True).repeat(len(found), 0) if self.shared else found

    def store(self, before: int) -> None:
        """Keep the newest tokens and the heavy hitters among the tokens of the first tier and the new ones; drop the others."""
        heavy, recent = self.budgets()
        newest = self.length - min(recent, self.length)
        for head in range(len(self.tier)):
            older = np.flatnonzero((self.tier[head, :newest] == 0) | (self.tier[head, :newest] == WINDOW))
            kept = older[self.greatest(self.saliency[head, older], heavy)]
            stay = np.union1d(kept, np.arange(newest, self.length))
            self.drop(head, np.setdiff1d(older, kept))
            self.keep(head, stay[stay >= before])


class H2O(HeavyHitterBudget):
    """H2O (arXiv:2306.14048): exact heavy hitters and exact recent tokens; the others are evicted."""

    def __init__(
        self, heavy: float | int = 0.2, recent: float | int = 0.2, policy: Policy | None = None, shared: bool = False
    ) -> None:
        super().__init__([16])
        self.amounts, self.policy, self.shared = (heavy, recent), policy or Policy(), shared

    def parts(self) -> tuple[int, int]:
        """`heavy` and `recent`: a whole number is a number of tokens, a float a share of the prompt."""
        heavy, recent = (part if isinstance(part, int) else count(part, self.prompt) for part in self.amounts)
        return heavy, recent


class MiKV(HeavyHitterBudget):
    """MiKV (arXiv:2402.18096): tokens that H2O would evict are retained at few bits, and keys are balanced with their queries."""

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
        policy: Policy | None = None,
        ranges: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Options of the method. A calibrated `balancer` is `[kv_heads, D]`, and so are both of the calibrated `ranges` (low,
        high), with which keys are quantised by channel (appendix C)."""
        both = (
            [bits["keys"], bits["values"]] if isinstance(bits, dict) else [bits] * 2 for bits in (important, retained)
        )
        super().__init__(list(both))
        self.policy, self.ranges = policy or Policy(), ranges
        self.ratio, self.balancer, self.group_size, self.clip = ratio, balancer, group, clip
        self.budget, self.recent = budget, recent

    def parts(self) -> tuple[int, int]:
        """Half of the budget each, an odd token recent; or `recent` tokens, and the rest heavy."""
        budget = self.budget or max(1, math.ceil(self.ratio * self.prompt - 1e-9))
        recent = budget - budget // 2 if self.recent is None else min(budget, self.recent)
        return budget - recent, recent

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """Set the scores, and with the prompt also the balancer."""
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
        """Quantise new tokens of a head into the important tier."""
        self.quantise(0, head, tokens)

    def drop(self, head: int, tokens: np.ndarray) -> None:
        """Quantise tokens of a head into the retained tier, from their exact values if they are new, else from decoded ones."""
        self.quantise(1, head, tokens)

    def quantise(self, tier: int, head: int, tokens: np.ndarray) -> None:
        """Quantise keys as Q(k b) / b (eq. 3 and 4) or by channel, and values by token; a stream of 16 bits stays as it is."""
        (of_keys, of_values), group = self.bits[tier], self.group_size or self.keys.shape[2] // 2
        keys, values, b = self.keys[head, tokens], self.values[head, tokens], self.balance[head]
        if of_keys == 16:
            coded = keys[None]
        elif self.ranges is None:
            coded = per_token(keys * b, of_keys, group, self.clip) / b
        else:
            low, high = (np.asarray(end[head], dtype=np.float64) for end in self.ranges)
            coded = per_channel(keys, of_keys, ([(high + low) / 2], [(high - low) / 2]), self.clip)
        self.put(
            tier,
            head,
            tokens,
            coded,
            values[None] if of_values == 16 else per_token(values, of_values, group, self.clip),
        )
