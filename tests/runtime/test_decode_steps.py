"""A long run of decode steps: the host never waits, a step's own work stays the same, and only the cache grows."""

from statistics import median

import pytest
import torch
from cases import BY_NAME, CASES
from host_waits import HostWaits, Operations, watched_layers
from layer_walk import Tokens, feed, pools_of
from live_tensors import live_tensors
from tolerances import MEMORY
from torch.utils._python_dispatch import _disable_current_modes
from toy_models import left_padded, random_model

from calib.runtime.offload import fetched_pool
from calib.runtime.paging.pages import TILE_TOKENS

STEPS = 2000
# Steps after which all schedules of the cases, and pages, are at the same phase again; and with ZipCache's blocks and shares.
PERIOD, BLOCKS_PERIOD = 384, 640
# Both stay within one tile of 4,096 tokens: a second tile would add operations of attention, not overhead.
LENGTHS = {"one row": [40], "ragged rows": [40, 23]}
QUICK = [
    ("kivi-2", "ragged rows"),
    ("kivi-2-calibrated", "one row"),
    ("rtn-4", "ragged rows"),
    ("zipcache", "ragged rows"),
    ("h2o", "one row"),
]
CELLS = [(case.name, lengths) for case in CASES for lengths in LENGTHS]


def watched(monkeypatch) -> list[HostWaits]:
    """Watches every `update` and `attend` of compressed layers from now on; one entry for each call.

    The gathering of fetched pairs is not watched: on a CPU it reads their number on the host, which it does not on a GPU.
    """
    gather = fetched_pool.host_gather

    def unseen(*arguments):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            gather(*arguments)

    monkeypatch.setattr(fetched_pool, "host_gather", unseen)
    return watched_layers(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lengths"), CELLS)
def test_2000_steps(name, lengths, monkeypatch):
    decode(random_model("llama"), name, lengths, STEPS, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(("name", "lengths"), QUICK)
def test_three_periods_of_steps(name, lengths, monkeypatch):
    """The same with one layer and three periods of steps: the second is compared with the third."""
    decode(random_model("llama", num_hidden_layers=1), name, lengths, 3 * period_of(name), monkeypatch)


def period_of(name: str) -> int:
    return BLOCKS_PERIOD if name.startswith("zipcache") else PERIOD


def decode(model, name: str, lengths: str, steps: int, monkeypatch) -> None:
    """Runs the decode steps and checks each of them, and all together."""
    inputs, period = left_padded(LENGTHS[lengths]), period_of(name)
    mask, token = inputs["attention_mask"], inputs["input_ids"][:, -1:]
    operations, beside = [], []
    with BY_NAME[name].open(model) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        calls = watched(monkeypatch)
        for step in range(1, steps + 1):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)  # as generate() passes it
            positions = mask.sum(-1, keepdim=True) - 1
            model(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
            assert len(calls) >= 2 * len(cache.compressed)  # `update` and `attend` of each layer
            assert not set().union(*(call.names for call in calls)), step
            operations.append(sum(call.operations.counts.total() for call in calls))
            calls.clear()
            if step % 100 == 0:
                memory = cache.memory()
                assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes
            if step in (period, steps - steps % period):  # windows hold as many tokens in both
                (tensors, size), memory = live_tensors(), cache.memory()
                beside.append((tensors, size - memory.measured_bytes - memory.host_bytes - mask.nbytes))
        assert cache.sequences.lengths == [length + steps for length in LENGTHS[lengths]]
    assert beside[0] == beside[1]
    early, late = operations[period : 2 * period], operations[-period:]
    # The least and the median number of operations: of steps that encode nothing, and of usual ones.
    assert min(early) == min(late) and median(early) == median(late)
    # All steps together: pools grow now and then, less and less often, and some probe queries are drawn at random; nothing
    # else may be added.
    assert sum(early) * 0.98 <= sum(late) <= sum(early) * 1.02


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case.tiered or case.on_host], ids=str)
def test_no_step_waits_whatever_it_does(case, monkeypatch):
    """Rows begin a block, complete one, fill a budget and evict from it in different steps; new pages are begun."""
    model, inputs = random_model("llama", num_hidden_layers=1), left_padded([60, 31, 9])
    mask, token = inputs["attention_mask"], inputs["input_ids"][:, -1:]
    with case.open(model) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        calls = watched(monkeypatch)
        for step in range(70):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            model(token, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1, past_key_values=cache)
            assert len(calls) >= 2 * len(cache.compressed)  # `update` and `attend` of each layer
            assert not set().union(*(call.names for call in calls)), step
            calls.clear()


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_makes_no_tensor_larger_than_a_tile(case):
    model = random_model("llama", num_hidden_layers=1)
    cache = case.open(model)
    cache.release()
    # More tokens than a tile; with tiers the larger tier has more than a tile, too.
    length = (2 if case.tiered else 1) * TILE_TOKENS + 700
    tokens = Tokens.random(model, length + 1, seed=1)
    # With tiers as one prompt, from whose length budgets follow.
    for at in range(0, length, length if case.tiered else 1000):
        feed(cache, [tokens[at : min(at + (length if case.tiered else 1000), length)]])
    for table in cache.sequences.all_tables:
        table.prepare(1)
    for layer in cache.compressed:  # the growth of a pool is no part of attention; see test_pages
        for table, pools in zip(cache.sequences.all_tables, pools_of(layer.store), strict=True):
            for pool in pools:
                pool.grow(table.capacity)
    with Operations() as operations:
        feed(cache, [tokens[length:]])
    # A tile of one stream: 2 KV heads of 32 channels (3 bits: 7 words of 5 codes are 35), or of components of a basis, where
    # every head has as many as the head with the most words. Scores are smaller.
    of_3_bits = case.name in (
        "kivi-3-short",
        "zipcache-accumulated",
        "mikv-calibrated",
        "turboquant-3",
        "kvquant-3-dense",
    )
    tiers = [tier for layer in cache.compressed for tier in getattr(layer.store, "tiers", [])]
    width = max([35 if of_3_bits else 32, *(width for tier in tiers for width in tier.coded.values())])
    assert 0 < operations.largest <= TILE_TOKENS * 2 * width and width <= 48


def test_the_watch_sees_waits():
    """The watch itself: each of these must be noticed."""
    x = torch.arange(4.0)
    for wait in (
        lambda: x.sum().item(),
        lambda: bool(x[0]),
        lambda: int(x[0]),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: x.to("cpu"),
        lambda: x.numpy(),
        lambda: x[x > 1],
        lambda: x.nonzero(),
        lambda: torch.equal(x, x),
        lambda: range(x.long()[1]),
        lambda: x.__setitem__(x > 1, 0.0),
    ):
        with HostWaits() as waits:
            wait()
        assert waits.names
    with HostWaits() as waits:
        torch.tensor([1, 2]).to("cpu")
        x[torch.tensor([1, 2])].sum().softmax(0)
    assert not waits.names
    with HostWaits() as waits:  # no uploads, although they may have the ids of tensors that are gone
        gone = [torch.tensor([1]) for _ in range(100)]
        del gone
        for part in [x + 1 for _ in range(100)]:
            part.to("cpu")
    assert waits.found["to(device)"] == 100
