"""A long forward is attended a tile of query rows at a time, whose size changes neither outputs nor what is stored."""

import pytest
import torch
from cases import BY_NAME
from layer_walk import Tokens, differing, feed, stored
from tolerances import ATTENTION
from toy_models import random_model

from calib.runtime.attend import attend
from calib.runtime.tiered import spans
from calib.runtime.tiered.spans import TieredTokens

pytestmark = pytest.mark.arithmetic

# Rows have parameters of their own (a correction's outliers), whose scores are listed.
LISTED = ["gear", "gear-paper", "gear-calibrated", "zipcache-corrected"]
NAMES = ["h2o", "mikv-8-2", "zipcache", "oracle", *LISTED]
ROWS, LOGITS = (attend, "QUERY_ROWS", 14), (spans, "LISTED_LOGITS", 2**13)
LIMITS = [(name, ROWS) for name in NAMES] + [(name, LOGITS) for name in LISTED]


def walked(name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of a forward of 90 tokens after a prompt of 130, and what is stored then."""
    model = random_model("llama")
    cache, tokens = BY_NAME[name].open(model), Tokens.random(model, 220, seed=11)
    cache.release()
    feed(cache, [tokens[:130]])
    outputs = [output for (output,) in feed(cache, [tokens[130:]])]
    return outputs, stored(cache, 0)


@pytest.mark.parametrize(
    ("name", "limit"), [pytest.param(name, limit, id=f"{name}-{limit[1]}") for name, limit in LIMITS]
)
def test_tiles_of_query_rows_leave_no_trace(monkeypatch, name, limit):
    sizes: list[int] = []

    def noted(tokens, *given, original=TieredTokens.columns_at_once):
        sizes.append(original(tokens, *given))
        return sizes[-1]

    monkeypatch.setattr(TieredTokens, "columns_at_once", noted)
    expected, kept = walked(name)
    assert min(sizes) > 90  # the whole forward at once
    monkeypatch.setattr(*limit)
    sizes.clear()
    outputs, found = walked(name)
    assert min(sizes) < 30
    for output, reference in zip(outputs, expected, strict=True):
        assert (output - reference).abs().max() <= ATTENTION[torch.float32] * reference.abs().max()
    assert not differing(found, kept)
