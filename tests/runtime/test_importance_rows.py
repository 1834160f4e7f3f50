"""Rows of importance methods against the equations in float64: beams, selected rows and drafts, in models of 32 and 16 bits."""

import pytest
import torch
from importance.rows import rows_beside
from importance.scenarios import EVICTED, THREE, Scenario, others, zipcache
from walk_steps import drafted, moved, single

pytestmark = pytest.mark.arithmetic

BF16, FP16 = torch.bfloat16, torch.float16
SHORT = {"recompress": 8}

# Beams of two prompts that came with drafts, ordered anew; then two rows alone. Of later drafts some, none and all are accepted.
STEPS = [
    *drafted(30, 13, rejected=4),
    *single(1, 2),
    *moved(0, 0, 1, 1),
    *single(1, 4),
    *moved(1, 0, 3, 3),
    *drafted(3, 3, 3, 3, rejected=2),
    *single(1, 4),
    *moved(2, 0),
    *drafted(0, 0, rejected=1),
    *drafted(9, 3, rejected=5),
    *drafted(1, 1, rejected=3),
    *drafted(2, 2),
    *single(4, 2),
]

SCENARIOS = [
    zipcache(tiers=THREE, **SHORT),
    zipcache(tiers=EVICTED, dtype=BF16, **SHORT),
    zipcache(refresh=False, probes="random", dtype=FP16, **SHORT),
    zipcache(salient_set="layer", scope="layer", gqa=1, dtype=BF16, logits={"sliding": 20}, **SHORT),
    others("mikv", layers=2),
    others("mikv", important=4, dtype=BF16),
    others("mikv", budget=20, recent=3, important=8, policy="normalised", dtype=FP16),
    others("h2o", layers=2),
    others("h2o", heavy=10, recent=5, gqa=4, dtype=BF16),
    others("h2o", policy="normalised", dtype=FP16, logits={"sliding": 20}),
    others("tova", layers=2),
    others("tova", budget=25, gqa=4, dtype=BF16),
    others("tova", budget=12, dtype=FP16, logits={"sliding": 20}),
    others("snapkv", window=4, layers=2),
    others("snapkv", window=8, budget=20, pool=5, gqa=4, dtype=BF16),
    others("snapkv", window=4, budget=15, dtype=FP16, logits={"sliding": 20}),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_rows_do_what_the_equations_say(scenario: Scenario):
    rows_beside(scenario, STEPS)
