"""Float64 oracle of the policies that score tokens for a budget (MiKV, arXiv:2402.18096, section 2.1 and figure 4)."""

import math
from collections.abc import Sequence

import numpy as np
from importance.draws import counter_hash, probe_rows

PINNED = 1e30  # larger than any attention: the score of special tokens that a policy keeps


class Policy:
    """Scores of one row's tokens, updated with each forward.

    `name` is `accumulated` (H2O), `normalised` (ZipCache, eq. 8), `last` (the newest query alone), `local` (the newest tokens) or
    `fastgen` (arXiv:2310.01801), which chooses a policy for each KV head. Attention of the prompt's `probes` counts, and of every
    later query.
    """

    def __init__(
        self,
        name: str = "accumulated",
        probes: str | None = None,
        share: float = 0.1,
        special_ids: Sequence[int] = (),
        recovery: float = 0.95,
        seed: int = 0,
        layer: int = 0,
    ) -> None:
        self.name, self.share, self.special_ids, self.recovery = name, share, special_ids, recovery
        self.seed, self.layer = seed, layer
        self.probes = probes or ("random+recent" if name in ("normalised", "fastgen") else "all")
        self.ids = np.zeros(0, dtype=int)
        self.margin = math.inf

    def special(self, tokens: int) -> np.ndarray:
        """Which of the first `tokens` tokens are special: bool `[tokens]`."""
        return np.isin(self.ids[:tokens], self.special_ids) if len(self.special_ids) else np.zeros(tokens, dtype=bool)

    def counted(self, count: int) -> list[int]:
        """The probes of a prompt of `count` tokens: query rows whose attention counts, rising."""
        if self.probes == "special":
            return np.flatnonzero(self.special(count)).tolist()
        return sorted(
            probe_rows(self.probes, self.share, count, lambda token: counter_hash(self.seed, self.layer, 0, token))
        )

    def observe(self, mass: np.ndarray, before: int, heavy: int, recent: int) -> np.ndarray:
        """Scores `[kv_heads, tokens]` after a forward of queries from `before` on with attention `mass [kv_heads, n, tokens]`."""
        heads, new, total = mass.shape
        position = np.arange(total)
        rows = list(range(new)) if before else self.counted(new)
        if not before:
            self.sums, self.seen = np.zeros((heads, 0)), np.zeros(0, dtype=int)
        self.sums, self.seen = np.pad(self.sums, ((0, 0), (0, new))), np.pad(self.seen, (0, new))
        self.sums += mass[:, rows].sum(1)
        self.seen += (before + np.array(rows, dtype=int)[:, None] >= position).sum(0)
        if self.name == "fastgen" and not before:
            self.heads = [self.chosen(own, rows, heavy, recent) for own in mass]
        if self.name == "fastgen":
            return np.stack([self.of_head(*own, total) for own in zip(self.heads, self.sums, strict=True)])
        return {
            "accumulated": self.sums,
            "normalised": np.where(self.seen, self.sums / np.maximum(self.seen, 1), 0),
            "last": mass[:, -1],
            "local": np.broadcast_to(position + 1.0, (heads, total)),
        }[self.name]

    def of_head(self, policy: tuple[bool, bool], sums: np.ndarray, total: int) -> np.ndarray:
        """Scores of one KV head under (special, frequent): special tokens first if kept, earlier ones before later ones; then by
        attention if `frequent`, else by position."""
        special, frequent = policy
        scores = sums if frequent else np.arange(total) + 1.0
        return np.where(self.special(total) & special, PINNED * (1000 - np.arange(total)), scores)

    def chosen(self, mass: np.ndarray, rows: list[int], heavy: int, recent: int) -> tuple[bool, bool]:
        """The first of the policies (special, frequent) whose tokens got the share `recovery` of the prompt's attention.

        `mass [n, n]` is that of one KV head. The local tokens of a query are those at most a window before it; the other tokens
        that a policy keeps are the same for all queries.
        """
        total = len(mass)
        older = np.arange(total) < total - recent
        pinned = np.flatnonzero(older & self.special(total))[:heavy]
        for special, frequent in ((False, False), (True, False), (False, True), (True, True)):
            if special and not len(self.special_ids):
                continue
            kept = list(pinned) if special else []
            window = recent if frequent else recent + heavy - len(kept)
            if frequent:
                sums = mass[rows].sum(0)
                others = [token for token in np.flatnonzero(older) if token not in kept]
                kept += sorted(others, key=lambda token: (-sums[token], token))[: heavy - len(kept)]
            recovered = sum(
                mass[row, token] for row in rows for token in range(row + 1) if row - token < window or token in kept
            )
            share = recovered / max(mass[rows].sum(), 1e-30)
            self.margin = min(self.margin, abs(share - self.recovery))
            if share >= self.recovery:
                return special, frequent
        return bool(len(self.special_ids)), True
