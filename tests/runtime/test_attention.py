"""A layer's attention against float64: more tokens or rows than a tile, more queries than a block, any pair of schedules."""

import oracle
import pytest
import torch
from cases import BY_NAME
from layer_walk import Tokens, feed
from tolerances import ATTENTION
from toy_models import random_model

from calib.runtime.attend.attend import QUERY_ROWS
from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer
from calib.runtime.ordered.sequence_state import OrderedSequenceState
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.ordered.stream import StreamPlan
from calib.runtime.paging.page_numbers import PAGE_TOKENS
from calib.runtime.paging.pages import TILE_TOKENS
from calib.runtime.prefix.prefix import Origin
from calib.runtime.stages.codec import Exact, UniformQuant
from calib.runtime.stages.schedule import Blocks, SlidingResidual
from calib.runtime.stages.transform import ChannelRange, ChannelScale, Identity
from calib.runtime.store import LayerContext

pytestmark = pytest.mark.arithmetic


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def check_next(cache, rows: list[Tokens]) -> None:
    """Feeds one more forward; compares it with float64 attention over the tokens that the cache held before and the new ones."""
    before = oracle.contents(cache)
    outputs = feed(cache, rows)
    for layer, held in enumerate(before):
        for row, tokens in enumerate(rows):
            if not len(tokens):
                continue
            keys, values = (
                torch.cat([old, new[layer].double()], 1)
                for old, new in zip(held[row][:2], (tokens.keys, tokens.values), strict=True)
            )
            expected = oracle.attention(tokens.queries[layer], keys, values, 32**-0.5)
            worst = (outputs[layer][row].double() - expected).abs().max() / expected.abs().max()
            assert worst < ATTENTION[torch.float32], (layer, row)


@pytest.mark.parametrize("name", ["full", "kivi-2-short", "kivi-2-calibrated", "rtn-4"])
def test_more_tokens_than_a_tile(model, name):
    cache, tokens = BY_NAME[name].open(model), Tokens.random(model, TILE_TOKENS + 600, seed=1)
    cache.release()
    feed(cache, [tokens[: TILE_TOKENS + 500]])
    check_next(cache, [tokens[TILE_TOKENS + 500 : TILE_TOKENS + 501]])
    check_next(cache, [tokens[TILE_TOKENS + 501 :]])


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", "kivi-2-short", "kivi-2-calibrated", "rtn-4"])
@pytest.mark.parametrize("rows", [20, TILE_TOKENS // PAGE_TOKENS + 3])
@pytest.mark.parametrize("level", [True, False], ids=["level", "ragged"])
def test_more_rows_than_a_tile(model, name, rows, level):
    cache = BY_NAME[name].open(model)
    cache.release()
    tokens = [Tokens.random(model, 260 + (0 if level else row % 5), seed=row) for row in range(rows)]
    feed(cache, [row[:-2] for row in tokens])
    check_next(cache, [row[-2:-1] for row in tokens])
    check_next(cache, [row[-1:] for row in tokens])


@pytest.mark.parametrize("name", ["full", "kivi-2-short", "kivi-2-calibrated"])
def test_more_queries_than_a_block(model, name):
    cache = BY_NAME[name].open(model)
    cache.release()
    tokens = Tokens.random(model, 150 + QUERY_ROWS // 2 + 90, seed=2)  # two query heads a KV head
    feed(cache, [tokens[:150]])
    check_next(cache, [tokens[150:]])


@pytest.mark.parametrize("name", ["kivi-2-short", "kivi-2-fine", "rtn-4"])
def test_a_long_prompt_in_equal_rows_is_stored_alike(model, name):
    """A prompt is encoded in pieces of TILE_TOKENS tokens over all rows, which must not cut a group of tokens."""
    together, rows = BY_NAME[name].open(model), [Tokens.random(model, 1500, seed=seed) for seed in range(3)]
    together.release()
    feed(together, rows)
    for row, tokens in enumerate(rows):
        alone = BY_NAME[name].open(model)
        alone.release()
        feed(alone, [tokens])
        for layer, held in enumerate(oracle.contents(alone)):
            assert all(map(torch.equal, held[0], oracle.contents(together)[layer][row]))


PER_HEAD = torch.tensor([0.8, 1.0])[:, None, None]
DRAWN = torch.rand(3, 2, 1, 32, generator=torch.Generator().manual_seed(0))
RANGE = ChannelRange.between(-2 - DRAWN[0, :, 0], 2 + DRAWN[1, :, 0])
SCALE = ChannelScale(0.5 + DRAWN[2])
SCHEDULES = [
    (SlidingResidual(0), SlidingResidual(0)),
    (SlidingResidual(0), SlidingResidual(40)),
    (SlidingResidual(0), Blocks(32)),
    (SlidingResidual(5), SlidingResidual(40)),
    (SlidingResidual(7), SlidingResidual(7)),
    (SlidingResidual(64), SlidingResidual(64)),
    (Blocks(32), Blocks(32)),
    (Blocks(16), Blocks(48)),
    (Blocks(16), SlidingResidual(48)),
    (Blocks(1), SlidingResidual(1)),
    (Blocks(160), SlidingResidual(200)),
    (Blocks(32), SlidingResidual(32)),
    (Blocks(160), SlidingResidual(160)),
]


@pytest.mark.parametrize("stages", ["uniform", "calibrated", "exact"])
@pytest.mark.parametrize(("keys", "values"), SCHEDULES, ids=str)
def test_any_pair_of_schedules_is_attended(model, keys, values, stages):
    cache, tokens = composed(keys, values, stages), [Tokens.random(model, 330, seed=seed) for seed in (3, 4)]
    at = [200, 37]
    feed(cache, [row[:start] for row, start in zip(tokens, at, strict=True)])
    # Decode steps, chunks, and chunks with padding, which are attended row by row. The second row then holds 96 tokens, where
    # blocks of 16, 32 and 48 tokens end: none of its tokens is exact.
    for counts in [*[(1, 1)] * 28, (20, 20), (1, 1), (3, 7), (1, 1), (5, 2), *[(2, 1)] * 8, (5, 0), (1, 1)]:
        check_next(cache, [row[start : start + n] for row, start, n in zip(tokens, at, counts, strict=True)])
        at = [start + n for start, n in zip(at, counts, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("stages", ["uniform", "calibrated"])
@pytest.mark.parametrize(("keys", "values"), SCHEDULES, ids=str)
def test_rows_of_one_length_are_attended_step_by_step(model, keys, values, stages):
    cache, tokens = composed(keys, values, stages), [Tokens.random(model, 420, seed=seed) for seed in (5, 6)]
    at = 0
    for stop in (1, 30, 126, 158, 190, 254, 318, 350, 414):  # before and after the ends of blocks and pages
        feed(cache, [row[at:stop] for row in tokens])
        for at in range(stop, stop + 5):
            check_next(cache, [row[at : at + 1] for row in tokens])
        at += 1


def composed(keys, values, stages: str) -> CompressedCache:
    """A cache of two layers with these schedules, and the transforms and codecs named by `stages`."""
    transform, key_codec, value_codec = {
        "uniform": (Identity(), UniformQuant(3, (1, 8)), UniformQuant(2, (1, None), PER_HEAD)),
        "calibrated": (RANGE, UniformQuant(2, None, PER_HEAD), UniformQuant(4, None)),
        "exact": (SCALE, Exact(), Exact()),
    }[stages]
    plan = LayerPlan(StreamPlan(transform, key_codec, keys), StreamPlan(transform, value_codec, values))
    rows = OrderedSequenceState(keys, values, 2)
    return CompressedCache(
        [CompressedLayer(plan, rows, LayerContext()) for _ in range(2)], rows, Origin("composed"), None
    )
