"""TOVA against its rule in float64, forward by forward: the last query's weights, averaged over all heads, decide for all heads."""

import numpy as np
import pytest
from importance.layer import EVICTED, WINDOW, LayerOracle
from importance.oracles import ORACLES
from importance.scenarios import WALKS, Scenario, others, walk_beside
from layer_walk import Tokens

from calib.runtime.methods import build

pytestmark = pytest.mark.arithmetic


class TovaOracle(LayerOracle):
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


SCENARIOS = [
    others("tova"),
    others("tova", budget=0.5, gqa=1),
    others("tova", budget=30, gqa=4),
    others("tova", "short prompt", budget=25),
    others("tova", "turns"),
    others("tova", "from one", budget=9),
    others("tova", "from one", budget=1, tokens=2),
    others("tova", "pages", budget=200),
    others("tova", "turns", logits={"sliding": 48}),
    others("tova", budget=60, logits={"sliding": 137}),
    others("tova", "from one", budget=30, logits={"sliding": 20}),  # more tokens than a query sees
    others("tova", "turns", gqa=4, logits={"sliding": 48, "softcap": 6.0, "scale": 0.3}),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_it_does_what_the_papers_rule_says(scenario: Scenario, monkeypatch):
    monkeypatch.setitem(ORACLES, "tova", TovaOracle)
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS[scenario.walk]), seed=scenario.tokens))


@pytest.mark.parametrize("budget", [0, 0.0, -1, 1.5, "10", True, None])
def test_a_budget_is_tokens_or_a_share(budget):
    with pytest.raises(ValueError, match=r"^budget must be") as error:
        build("tova", {"budget": budget})
    range_and_value = f"tokens (a whole number from 1) or a share (above 0, to 1.0), got {budget!r}; 0.2 of the prompt"
    assert range_and_value in str(error.value)
