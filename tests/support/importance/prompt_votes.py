"""Float64 oracle of SnapKV: the prompt's last queries choose among the tokens before them."""

import numpy as np
from importance.layer import LayerOracle


class SnapKV(LayerOracle):
    """arXiv:2404.14469, sections 4.1 and 4.2, applied to the first forward alone."""

    def __init__(self, budget: float | int = 0.2, window: int = 32, pool: int = 7) -> None:
        super().__init__([16])
        self.budget, self.window, self.pool = budget, window, pool

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """Votes of the last `window` query rows for the tokens before these, max-pooled along positions."""
        if not before:
            prefix = max(0, self.length - self.window)
            votes, reach = mass[:, -self.window :, :prefix].sum(1), self.pool // 2
            near = [votes[:, max(0, i - reach) : i + reach + 1].max(1) for i in range(prefix)]
            self.saliency = np.stack(near, 1) if near else votes

    def store(self, before: int) -> None:
        """Of a prompt the chosen tokens and the window stay; later tokens are all added."""
        share = isinstance(self.budget, float)
        budget = int(np.ceil(self.budget * self.prompt - 1e-9)) if share else self.budget
        for head in range(len(self.tier)):
            stay = np.arange(before, self.length)
            if not before and self.length > max(budget, self.window):
                prefix = self.length - self.window
                chosen = self.greatest(self.saliency[head], max(0, budget - self.window))
                stay = np.concatenate([chosen, stay[prefix:]])
                self.evict(head, np.setdiff1d(np.arange(prefix), chosen))
            self.put(0, head, stay, self.keys[head, stay][None], self.values[head, stay][None])

    def greatest(self, scores: np.ndarray, wanted: int) -> np.ndarray:
        """Indices of the `wanted` greatest scores. Equal ones, pooled from one vote, go by position: if the border is among them,
        `margin` is the distance to the next other score."""
        order = np.argsort(-scores, kind="stable")
        if 0 < wanted < len(scores):
            last = scores[order[wanted - 1]]
            more, less = scores[scores > last], scores[scores < last]
            tied = scores[order[wanted]] == last
            gaps = [(last - less.max()) / last] if less.size else []
            gaps += [(more.min() - last) / more.min()] if tied and more.size else []
            self.margin = min(self.margin, *gaps, np.inf)
        return order[:wanted]
