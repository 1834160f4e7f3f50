"""A long run of decode steps: the host never waits, a step's own work stays the same, and only the cache grows."""

import pytest
import torch
from cases import BY_NAME, CASES
from host_waits import HostWaits, Operations
from layer_walk import Tokens, feed
from live_tensors import live_tensors
from tolerances import MEMORY
from toy_models import left_padded, random_model

from calib.runtime.layer import CompressedLayer
from calib.runtime.pages import TILE_TOKENS

STEPS = 2000
PERIOD = 384  # steps after which every schedule of the table, and the pages, are where they were
# Both within one tile of 4,096 tokens to the end: a further tile is more attention, not more overhead.
LENGTHS = {"one row": [40], "ragged rows": [40, 23]}
QUICK = [("kivi-2", "ragged rows"), ("kivi-2-calibrated", "one row"), ("rtn-4", "ragged rows")]
CELLS = [(case.name, lengths) for case in CASES for lengths in LENGTHS]


def watched(monkeypatch) -> list[HostWaits]:
    """Watches every `update` and `attend` of compressed layers from now on; one entry for each call."""
    calls = []
    for name in ("update", "attend"):
        original = getattr(CompressedLayer, name)

        def method(layer, *arguments, original=original, **options):
            with HostWaits() as waits:
                result = original(layer, *arguments, **options)
            calls.append(waits)
            return result

        monkeypatch.setattr(CompressedLayer, name, method)
    return calls


@pytest.mark.parametrize(
    ("name", "lengths"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow, id="-".join(cell)) for cell in CELLS],
)
def test_2000_steps(name, lengths, monkeypatch):
    model, inputs = random_model("llama"), left_padded(LENGTHS[lengths])
    mask, token = inputs["attention_mask"], inputs["input_ids"][:, -1:]
    operations, beside = [], []
    with BY_NAME[name].open(model) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        calls = watched(monkeypatch)
        for step in range(1, STEPS + 1):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)  # as generate() passes it
            places = mask.sum(-1, keepdim=True) - 1
            model(token, attention_mask=mask, position_ids=places, past_key_values=cache)
            assert not set().union(*(call.names for call in calls)), step
            operations.append(sum(call.operations.counts.total() for call in calls))
            calls.clear()
            if step % 100 == 0:
                memory = cache.memory()
                assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes
            if step in (PERIOD, STEPS):
                tensors, size = live_tensors()
                beside.append((tensors, size - cache.memory().measured_bytes - mask.nbytes))
        assert cache.rows.lengths == [length + STEPS for length in LENGTHS[lengths]]
    assert beside[0] == beside[1]
    # Growing the pools costs a few operations now and then, less and less often; nothing else may be added.
    early, late = (sum(operations[at : at + PERIOD]) for at in (PERIOD, STEPS - PERIOD))
    assert early * 0.98 <= late <= early * 1.02


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_makes_no_tensor_larger_than_a_tile(case):
    model = random_model("llama")
    cache = case.open(model)
    cache.release()
    length = 2 * TILE_TOKENS + 700
    tokens = Tokens.random(model, length + 1, seed=1)
    for at in range(0, length, 1000):
        feed(cache, [tokens[at : min(at + 1000, length)]])
    for stream in cache.compressed[0].store.streams:  # the growth of a pool is no part of attention; see test_pages
        stream.pool.grow(cache.rows.table.capacity)
    with Operations() as operations:
        feed(cache, [tokens[length:]])
    # A tile of one stream: 2 KV heads of 32 channels (3 bits: 7 words of 5 codes are 35). Scores are smaller.
    assert 0 < operations.largest <= TILE_TOKENS * 2 * (35 if "-3" in case.name else 32)


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
