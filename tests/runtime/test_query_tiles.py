"""A long forward is attended a tile of query rows at a time, whose size changes neither outputs nor what is stored."""

import pytest
import torch
from cases import BY_NAME
from layer_walk import Tokens, differing, feed, stored
from tolerances import ATTENTION
from toy_models import random_model

from calib.runtime.attend import attend
from calib.runtime.tiered import spans

pytestmark = pytest.mark.arithmetic

NAMES = ["h2o", "mikv-8-2", "zipcache", "oracle", "gear", "gear-paper", "gear-calibrated", "zipcache-corrected"]


def walked(name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of a forward of 90 tokens after a prompt of 130, and what is stored then."""
    model = random_model("llama")
    cache, tokens = BY_NAME[name].open(model), Tokens.random(model, 220, seed=11)
    cache.release()
    feed(cache, [tokens[:130]])
    outputs = [output for (output,) in feed(cache, [tokens[130:]])]
    return outputs, stored(cache, 0)


@pytest.mark.parametrize(
    "limit", [(attend, "QUERY_ROWS", 14), (spans, "LISTED_LOGITS", 2**13)], ids=lambda limit: limit[1]
)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_query_rows_leave_no_trace(monkeypatch, name, limit):
    expected, kept = walked(name)
    monkeypatch.setattr(*limit)
    outputs, found = walked(name)
    for output, reference in zip(outputs, expected, strict=True):
        assert (output - reference).abs().max() <= ATTENTION[torch.float32] * reference.abs().max()
    assert not differing(found, kept)
