"""Blocks of rows of different lengths are encoded together, and every row is stored as if it were alone."""

import copy

import pytest
import torch
from cases import BY_NAME, CASES
from layer_walk import Tokens, differing, feed, stored
from tolerances import FLOAT32_ATTENTION
from toy_models import random_model

from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.tiered.chunks import ChunkStore
from calib.runtime.tiered.tier import Tier

PROMPTS, STEPS = [33, 9, 50, 33], 44
IN_CHUNKS = [case for case in CASES if isinstance(getattr(case.plan, "tiering", None), RatioTiers)]


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def decoded(cache, rows: list[Tokens]) -> None:
    """Prompts, and then a token of each row at a time."""
    feed(cache, [row[: len(row) - STEPS] for row in rows])
    decoded_from(cache, rows)


def decoded_from(cache, rows: list[Tokens]) -> None:
    """Feeds the last STEPS tokens of each row, one a step."""
    for step in range(-STEPS, 0):
        feed(cache, [row[len(row) + step : len(row) + step + 1] for row in rows])


@pytest.mark.full
@pytest.mark.parametrize("case", IN_CHUNKS, ids=str)
def test_a_row_is_stored_as_if_it_were_alone(model, case):
    rows = [Tokens.random(model, prompt + STEPS, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    together = case.open(model)
    together.release()
    decoded(together, rows)
    for number, row in enumerate(rows):
        alone = case.open(model)
        alone.release()
        decoded(alone, [row])
        found, expected = stored(together, number), stored(alone, 0)
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            if name.endswith("mass"):  # sums whose order depends on the shape of a product
                assert (found[name] - part).abs().max() <= FLOAT32_ATTENTION * max(1, part.abs().max()), name
            else:
                assert torch.equal(found[name], part), name


@pytest.mark.full
@pytest.mark.parametrize("name", ["klt-short", "zipcache-short", "zipcache-before-rope"])
def test_blocks_of_all_rows_are_one_group(model, name, monkeypatch):
    """All rows are encoded in one call, whatever they hold before the block."""
    groups, take_in = [], ChunkStore._take_in
    monkeypatch.setattr(
        ChunkStore, "_take_in", lambda store, rows, *rest: groups.append(rows) or take_in(store, rows, *rest)
    )
    rows = [Tokens.random(model, prompt + STEPS, seed=prompt) for prompt in (61, 45, 50, 64)]  # a first chunk each
    cache = BY_NAME[name].open(model)
    cache.release()
    feed(cache, [row[: len(row) - STEPS] for row in rows])
    prompts = len(groups)
    decoded_from(cache, rows)
    assert len(groups) > prompts and all(own == [0, 1, 2, 3] for own in groups[prompts:])


@pytest.mark.parametrize("name", ["klt-short", "oscar", "kvarn-short", "kvquant"])
def test_a_turn_is_encoded_at_once(model, name, monkeypatch):
    """One call a layer encodes all blocks of a turn if blocks share no numbers; the bits are those of encoding block by block."""
    joined, tokens = BY_NAME[name].open(model), Tokens.random(model, 250, seed=3)
    by_blocks, calls, encode = copy.deepcopy(joined), [], Tier.encode
    for cache in (joined, by_blocks):
        cache.release()
        feed(cache, [tokens[:70]])
        for layer in cache.compressed:
            layer.store.joins_blocks &= cache is joined
    monkeypatch.setattr(Tier, "encode", lambda *given: calls.append(given) or encode(*given))
    feed(joined, [tokens[70:]])
    assert len(calls) == len(joined.compressed)
    feed(by_blocks, [tokens[70:]])
    assert len(calls) > 5 * len(joined.compressed)
    assert not differing(stored(joined, 0), stored(by_blocks, 0))
