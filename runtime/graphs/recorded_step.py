"""A step recorded once and replayed: a CUDA graph, which the host starts with one call for all its kernels."""

from collections.abc import Callable
from contextlib import suppress
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

        Raises whatever `step` raises, and RuntimeError for one that waits for the device or copies host memory to it.
        """
        self.graph, self.stream, self.memory = torch.cuda.CUDAGraph(), stream, memory
        stream.wait_stream(torch.cuda.current_stream())
        # Not torch.cuda.graph, which first collects garbage and empties the allocator's cache: that takes as long as many steps.
        with torch.cuda.stream(stream):
            self.graph.capture_begin(pool=memory, capture_error_mode="thread_local")
            try:
                self.result = step()
            except BaseException:
                with suppress(RuntimeError):
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        """Replays the graph; afterwards `result` holds this time's values."""
        self.graph.replay()


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
