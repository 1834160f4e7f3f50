"""`cache.tiers(layer)`: which tokens of a row are in which tier, against the tokens that the oracle decodes."""

import oracle
import pytest
import torch
from cases import CASES
from layer_walk import Tokens, feed
from toy_models import random_model

from calib.runtime import compress

pytestmark = pytest.mark.arithmetic


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def filled(model, cache):
    """Feeds three rows of different lengths, then five decode steps."""
    feed(cache, [Tokens.random(model, size, seed=size) for size in (3, 150, 61)], columns=151)
    for step in range(5):
        feed(cache, [Tokens.random(model, 1, seed=step + row) for row in range(3)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiers_are_those_of_the_oracle(case, model):
    cache = case.open(model)
    cache.release()
    filled(model, cache)
    for number, layer in enumerate(cache.compressed):
        rows = cache.tiers(number)
        assert len(rows) == 3
        for row, tiers in enumerate(rows):
            held = oracle.held_tokens(layer, row)
            on_device = [tier for tier in tiers if not tier.host or len(tiers) == 1]
            assert sum(tier.count for tier in on_device) == held.keys.shape[1]
            assert all(tier.count > 0 and tier.keys_bits > 0 and tier.values_bits > 0 for tier in tiers)
            if held.positions is not None:
                found = torch.cat([tier.positions for tier in on_device], -1).sort(-1).values
                assert torch.equal(found, held.positions.sort(-1).values.expand_as(found))
            for tier in tiers:
                if tier.host:
                    assert tier.positions.tolist()[0] == list(range(cache.sequences.lengths[row]))
                if tier.positions is not None:
                    assert tier.positions.shape == (2, tier.count) and bool((tier.positions.diff(dim=-1) > 0).all())


def test_kivi_packs_keys_ahead_of_values(model):
    """Of 155 tokens 128 keys (blocks of 32, one every 32 steps) and 155 - 32 values are packed; scales and zero points count."""
    with compress(model, "kivi", bits=2, group=32, residual=32) as cache:
        filled(model, cache)
        tiers = cache.tiers(1)[1]
    spans = [(tier.positions[0, 0].item(), tier.positions[0, -1].item() + 1) for tier in tiers]
    assert spans == [(0, 123), (123, 128), (128, 155)]
    width = 32 // model.config.head_dim
    assert [tier.keys_bits for tier in tiers] == [3.0, 3.0, 32.0]
    assert [tier.values_bits for tier in tiers] == [2 + max(1, width), 32.0, 32.0]


def test_a_layer_that_is_not_there_is_refused(model):
    with compress(model, "kivi") as cache:
        assert cache.tiers(0) == []
        for wrong, said in ((2, "2"), (-1, "-1"), ("0", "'0'")):
            with pytest.raises(
                ValueError, match=rf"layer {said} is not compressed by this cache; its layers are \[0, 1\]"
            ):
                cache.tiers(wrong)
