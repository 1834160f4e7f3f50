"""A step recorded once and replayed: a CUDA graph, which the host starts with one call for all its kernels."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch


class Recorded(Protocol):
    """Work on a device that every `replay` repeats, in the same memory."""

    result: Any

    def replay(self) -> None:
        """Repeats the work; afterwards `result` holds this time's values."""
        ...


class CudaGraph:
    """A CUDA graph of `step`, whose `result` is what `step` returned. Recording does not run it."""

    def __init__(self, step: Callable[[], Any], stream: torch.cuda.Stream, memory: Any) -> None:
        """Records `step` on a side `stream`; `memory` is a pool shared by graphs that are replayed one after the other.

        Raises whatever `step` raises, and RuntimeError for one that waits for the device or uploads numbers (`upload`).
        """
        self.graph, self.stream, self.memory = torch.cuda.CUDAGraph(), stream, memory
        stream.wait_stream(torch.cuda.current_stream())
        # Not torch.cuda.graph, which first collects garbage and empties the allocator's cache: that takes as long as many steps.
        with torch.cuda.stream(stream), _no_collection():
            try:
                self.graph.capture_begin(pool=memory, capture_error_mode="thread_local")
                self.result = step()
                self.graph.capture_end()
            except BaseException:
                _ended(self.graph, stream, memory)
                raise
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        """Replays the graph; afterwards `result` holds this time's values."""
        self.graph.replay()


# Failed graphs that torch's allocator of pinned memory still asks whether they are being recorded.
_failed: list[torch.cuda.CUDAGraph] = []


def _ended(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, memory: Any) -> None:
    """Ends a recording that has failed.

    If the step has waited for the device, `capture_end` raises. In torch 2.11 the allocator then goes on as if the graph were
    recorded (pytorch/pytorch#180395): in the whole process it no longer frees memory that several streams used, and releases no
    cached memory when there is too little.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):  # raised where torch has ended it
        torch._C._cuda_endAllocateToPool(stream.device.index, memory)
        _failed.append(graph)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Within the context no garbage is collected: a tensor in pinned memory that is freed while a step is recorded would add
    copies and events to the graph (`pinned_kv`)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Record = Callable[[Callable[[], Any]], Recorded]


def recorder(device: torch.device) -> Record | None:
    """Returns a function that records steps on `device`; None unless it is a CUDA device. All its recordings share one memory
    pool."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        stream, memory = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        # The allocator frees a pool with its last graph, and then refuses the handle. A block's graph is dropped before the
        # next block's is recorded, so this graph, which lives as long as the recorder, keeps the pool.
        keeper = CudaGraph(partial(torch.zeros, 1, device=device), stream, memory)

    def record(step: Callable[[], Any]) -> Recorded:
        with torch.cuda.device(device):
            return CudaGraph(step, keeper.stream, keeper.memory)

    return record
