"""CUDA graphs that share a memory pool, simulated: the pool lives as long as its recorder, which records block after block."""

import copy
import gc

import pooled_graphs
import pytest
import torch
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.graphs import recorded_step, step_graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def live(monkeypatch):
    """Counts of live graphs, by pool."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **of: zeros(*size, device=CPU, **of))
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    return pooled_graphs.use(monkeypatch)


def test_a_pool_outlives_the_graphs_that_are_recorded_into_it(live):
    """The recorder keeps one graph in the pool, whatever happens to the others; it is freed with the recorder."""
    record = recorded_step.recorder(CUDA)
    (pool,) = live
    assert live[pool] == 1
    x = torch.zeros(3)
    for number in range(3):
        recorded = record(lambda: x.add_(1))
        assert live[pool] == 2 and not (x - number).any()
        recorded.replay()
        assert torch.equal(recorded.result, torch.full((3,), number + 1.0))
        del recorded
        assert live[pool] == 1
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0)
    assert record(lambda: x * 2).result is not None
    del record
    gc.collect()
    assert live[pool] == 0


def test_nothing_records_on_a_cpu():
    assert recorded_step.recorder(CPU) is None


@pytest.mark.full
@pytest.mark.parametrize("method", ["kivi", "zipcache"])
def test_steps_are_recorded_block_after_block(method, live, monkeypatch):
    """Every encoded block drops the graph of the steps before it, then the next block's is recorded into the same pool.

    The model has one layer: a second one's inputs differ in their last bits (sums of other shapes), so that a code may differ.
    """
    monkeypatch.setattr(step_graphs, "recorder", lambda device: recorded_step.recorder(CUDA))
    model, found, counts = random_model("llama", num_hidden_layers=1), [], []
    for graphs in (False, True):
        with compress(model, method, graphs=graphs) as cache, torch.no_grad():
            ids = torch.randint(1, 100, (2, 40), generator=torch.Generator().manual_seed(6))
            logits = [model(input_ids=ids, past_key_values=cache).logits[:, -1]]
            other = copy.deepcopy(cache) if graphs else None  # its graphs come from the same recorder
            for step in range(400):  # until rows need more pages than there is room for
                token = torch.full((2, 1), 1 + step % 90)
                logits.append(model(input_ids=token, past_key_values=cache).logits[:, -1])
                if graphs and step < 130:
                    model(input_ids=token, past_key_values=other)
                counts += [max(live.values(), default=0)] if graphs else []
            if graphs:
                assert not cache.graphs.refused and not other.graphs.refused
                assert cache.graphs.replays > 200 and other.graphs.replays > 100
                other.release()
        found.append(torch.stack(logits))
    assert set(counts) == {1, 2, 3} and len(live) == 1  # the pool's own, and at most one of each cache
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
