"""Simulated CUDA graphs for a machine without a GPU, with the allocator's rule for graphs that share a memory pool.

Each graph is a `Tape`. A pool lives from the first capture into it until its last graph is gone; torch's allocator then refuses
every further capture into it (`create_or_incref_pool` in c10/cuda/CUDACachingAllocator.cpp asserts that a pool has a user).
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from step_tape import Tape


class PooledGraph:
    """Replaces `torch.cuda.CUDAGraph`; `live` counts the graphs of every pool that was ever captured into."""

    live: Counter[object] = Counter()

    def __init__(self) -> None:
        self.tape, self.pool = Tape(), None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        """Begin to record; raises RuntimeError if the pool had graphs and all of them are deleted."""
        if self.live.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.live[pool] += 1
        self.pool = pool
        self.tape.begin()

    def capture_end(self) -> None:
        """End the recording; tensors from before it have their old content again, as after a capture, which runs nothing."""
        self.tape.end()

    def replay(self) -> None:
        """Run the recorded operations again (`Tape.replay`)."""
        self.tape.replay()

    def __del__(self) -> None:
        if self.pool is not None:
            self.live[self.pool] -= 1


class _Stream:
    """Replaces `torch.cuda.Stream`: operations on it run at once."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: "_Stream") -> None:
        """Does nothing."""


def use(monkeypatch: Any) -> Counter[object]:
    """Replace torch.cuda's graphs and streams until the end of the test; return the count of live graphs by pool."""
    monkeypatch.setattr(PooledGraph, "live", Counter())
    for name, stand_in in {
        "CUDAGraph": PooledGraph,
        "Stream": _Stream,
        "current_stream": lambda: _Stream(),
        "graph_pool_handle": object,
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return PooledGraph.live
