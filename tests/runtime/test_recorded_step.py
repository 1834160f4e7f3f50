"""CUDA graphs that share a memory pool, simulated: the pool lives as long as its recorder, which records block after block."""

import copy
import gc
import sys
from contextlib import suppress

import pooled_graphs
import pytest
import torch
from cases import BY_NAME
from toy_models import left_padded, random_model

from calib.kernels.upload import upload
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


@pytest.mark.parametrize("ends_it", [False, True], ids=["torch leaves it", "torch ends it"])
def test_a_recording_that_cuda_has_refused_is_ended_in_the_allocator(ends_it, live, monkeypatch):
    """If a step waits for the device, `capture_end` raises, and torch 2.11 goes on allocating as if the graph were recorded. It may
    also ask the graph later on, which is therefore kept."""
    record, ended, kept = recorded_step.recorder(CUDA), [], []
    monkeypatch.setattr(recorded_step, "_failed", kept)

    def end(device: int, pool: object) -> None:
        ended.append((device, pool))
        if ends_it:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def capture_end(graph: pooled_graphs.PooledGraph) -> None:
        with suppress(IndexError):  # it has ended already
            graph.tape.end()
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(pooled_graphs.PooledGraph, "capture_end", capture_end)
    for step in (
        lambda: float(torch.ones(()).sum()),
        lambda: torch.ones(2),
    ):  # it fails; it hides that CUDA has refused it
        with pytest.raises(RuntimeError, match=r"cannot be recorded|previous error"):
            record(step)
    (pool,) = live
    assert ended == [(0, pool)] * 2
    assert len(kept) == (0 if ends_it else 2)


def test_no_garbage_is_collected_while_a_step_is_recorded(live):
    """A tensor in pinned memory that is freed then would add copies to the graph."""
    record, found = recorded_step.recorder(CUDA), []
    record(lambda: found.append(gc.isenabled()))
    with pytest.raises(ZeroDivisionError):
        record(lambda: found.append(gc.isenabled()) or 1 / 0)
    assert found == [False, False] and gc.isenabled()
    gc.disable()
    try:
        record(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_numbers_are_not_uploaded_while_a_step_is_recorded(monkeypatch):
    """torch records the copy, from memory that it keeps: all replays would read the same numbers."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="numbers are uploaded while a CUDA graph is recorded"):
        upload([1, 2], torch.int64, CUDA)
    assert upload([1, 2], torch.int64, CPU).tolist() == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize("method", ["kivi-2", "mikv-16-2", "zipcache"])
def test_no_recorded_step_uploads_numbers(method, monkeypatch):
    """By the kernels for GPUs, interpreted: all numbers are among the step's inputs, or were uploaded by the step before."""
    recording, uploaded = [], []

    class Once:
        """Runs a step where a graph would record it."""

        def __init__(self, step):
            recording.append(step)
            self.result = step()
            recording.clear()

        def replay(self):
            """No launch."""

    def noted(numbers, dtype, device):
        uploaded.append(bool(recording))
        return upload(numbers, dtype, device)

    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(step_graphs, "recorder", lambda device: Once)
    for module in [module for name, module in sys.modules.items() if name.startswith("calib.")]:
        if getattr(module, "upload", None) is upload:
            monkeypatch.setattr(module, "upload", noted)
    model = random_model("llama", num_hidden_layers=2)
    with BY_NAME[method].open(model, graphs=True) as cache, torch.no_grad():
        model(**left_padded([9, 20]), past_key_values=cache)
        for number in range(5):
            positions = torch.tensor(cache.sequences.lengths)[:, None]
            model(input_ids=torch.full((2, 1), number), position_ids=positions, past_key_values=cache)
        assert cache.graphs.replays and not cache.graphs.refused
    assert uploaded and not any(uploaded)


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
