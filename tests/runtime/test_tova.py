"""TOVA against its rule in float64, forward by forward: the last query's weights, averaged over all heads, decide for all heads."""

import pytest
from importance.scenarios import WALKS, Scenario, others, walk_beside
from layer_walk import Tokens

from calib.runtime.methods import build

pytestmark = pytest.mark.arithmetic


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
def test_it_does_what_the_papers_rule_says(scenario: Scenario):
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS[scenario.walk]), seed=scenario.tokens))


@pytest.mark.parametrize("budget", [0, 0.0, -1, 1.5, "10", True, None])
def test_a_budget_is_tokens_or_a_share(budget):
    with pytest.raises(ValueError, match=r"^budget must be") as error:
        build("tova", {"budget": budget})
    range_and_value = f"tokens (a whole number from 1) or a share (above 0, to 1.0), got {budget!r}; 0.2 of the prompt"
    assert range_and_value in str(error.value)
