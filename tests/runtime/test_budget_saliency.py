"""A token budget keeps the tokens that its saliency ranks highest, for each KV head or one set for all, against float64."""

from dataclasses import dataclass

import pytest
import torch
from importance.budget import H2O
from importance.oracles import ORACLES
from importance.policies import Policy
from importance.scenarios import WALKS, others, walk_beside
from layer_walk import Tokens, feed

from calib.runtime import compress, methods
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.saliency import Accumulated, LastQuery, Normalised
from calib.runtime.stages.tiering import HeavyHitterBudget, RatioTiers
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

pytestmark = pytest.mark.arithmetic

SALIENCIES = {"accumulated": Accumulated(), "normalised": Normalised(), "last": LastQuery()}


@dataclass(frozen=True)
class Budget:
    """`h2o` with a saliency of choice, for each KV head or for all."""

    kind: str = "accumulated"
    shared: bool = False
    heavy: float | int = 0.2
    recent: float | int = 0.2

    def plan(self, layer, geometry, artifact):
        stages = TierStages(Identity(), Exact())
        tiering = HeavyHitterBudget(self.heavy, self.recent)
        saliency = SALIENCIES[self.kind]
        return TieredPlan((TierPlan(stages, stages),), tiering, saliency, shared_across_heads=self.shared)


def oracle(kind="accumulated", shared=False, **options):
    """The same budget in float64."""
    return H2O(policy=Policy(kind, probes="all"), shared=shared, **options)


@pytest.fixture(autouse=True)
def budget(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "budget", Budget)
    monkeypatch.setitem(ORACLES, "budget", oracle)


@pytest.mark.parametrize("walk", ["steps", "turns", "from one"])
@pytest.mark.parametrize("shared", [False, True], ids=["each head", "one set"])
@pytest.mark.parametrize("kind", SALIENCIES)
def test_a_budget_keeps_what_its_saliency_says(kind, shared, walk):
    sizes = {"heavy": 6, "recent": 1} if walk == "from one" else {}
    scenario = others("budget", walk, kind=kind, shared=shared, **sizes)
    model = scenario.model()
    walk_beside(scenario, model, Tokens.random(model, sum(WALKS[walk]), seed=scenario.tokens))


@pytest.mark.parametrize("kind", SALIENCIES)
def test_one_set_is_the_same_tokens_in_every_head(kind):
    model = others("budget").model()
    cache = compress(model, "budget", kind=kind, shared=True)
    apart = compress(model, "budget", kind=kind)
    tokens = Tokens.random(model, 100, seed=5)
    for own in (cache, apart):
        own.release()
        feed(own, [tokens[:60]])
        for at in range(60, 100):
            feed(own, [tokens[at : at + 1]])
    kept = [own.compressed[0].store.positions(0, 0).sort(-1).values for own in (cache, apart)]
    assert (kept[0] == kept[0][:1]).all() and not (kept[1] == kept[1][:1]).all()


def test_chunks_are_not_scored_by_the_newest_query():
    stages = TierStages(Identity(), Exact())
    plan = TieredPlan((TierPlan(stages, stages),), RatioTiers((1.0,), 8), LastQuery())
    with pytest.raises(ValueError, match="LastQuery scores by the newest query alone"):
        plan.check(64, torch.float32)
