"""Float64 oracle of TOVA: the last query's attention decides for all heads."""

import numpy as np
from importance.layer import EVICTED, WINDOW, LayerOracle


class Tova(LayerOracle):
    """arXiv:2401.06104, section 3.2, with the newest token kept; nothing of it is shared with the other budgets."""

    def __init__(self, budget: float | int = 0.2) -> None:
        super().__init__([16])
        self.budget = budget

    def observe(self, query: np.ndarray, mass: np.ndarray, before: int) -> None:
        """`mass` has sums over the query heads of each KV head: their sum over the number of query heads is the mean."""
        self.last = mass[:, -1].sum(0) / len(query)

    def store(self, before: int) -> None:
        """Evicts the least attended tokens beyond the budget."""
        size = self.budget if isinstance(self.budget, int) else max(1, int(np.ceil(self.budget * self.prompt - 1e-9)))
        held = np.flatnonzero(self.tier[0] != EVICTED)[:-1]  # all heads hold the same
        kept = held[self.greatest(self.last[held], size - 1)]
        stay = np.append(kept, self.length - 1)
        for head in range(len(self.tier)):
            new = stay[self.tier[head, stay] == WINDOW]
            self.put(0, head, new, self.keys[head, new][None], self.values[head, new][None])
            self.evict(head, np.setdiff1d(held, kept))
