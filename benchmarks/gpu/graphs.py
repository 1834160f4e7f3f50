"""A step's launches recorded once and replayed: what remains is the device's own time."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from calib.runtime.memory import tensors

# Host memory whose copy to the device is part of a graph: read again by every replay, so it lives as long as the process.
_kept: list[Tensor] = []


def replayed(bench: Bench, step: Callable[[], object], holder: Any) -> tuple[Callable[[], object], str]:
    """`step` as a graph's replay, and "graph"; or itself and why it could not be recorded ("eager: ...").

    A step that advances a length on the host is recorded at one length: every replay writes the same slots again. What a
    step does on the host, and what it does only in some steps (encoding a full block), is not in the graph. The tensors of
    `holder` that the step replaces by others outlive it: replays go on reading the first.
    """
    if not bench.on_gpu:
        return step, "eager: no GPU"
    try:
        return _recorded(step, holder), "graph"
    except Exception as error:  # whatever the reason, the step runs as it is
        torch.cuda.synchronize()
        return step, f"eager: {one_line(error)}"


def _recorded(step: Callable[[], object], holder: Any) -> Callable[[], object]:
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    gc.collect()  # nothing may be given back, and wait for the device, while it records
    graph, pin, results = torch.cuda.CUDAGraph(), Tensor.pin_memory, [list(tensors(holder))]

    def kept(tensor: Tensor, *args: Any) -> Tensor:
        _kept.append(pin(tensor, *args))
        return _kept[-1]

    Tensor.pin_memory = kept  # type: ignore[method-assign, assignment]
    try:
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            results.append(step())  # type: ignore[arg-type]
    finally:
        Tensor.pin_memory = pin  # type: ignore[method-assign]

    def replay() -> object:
        graph.replay()
        return results[-1]

    replay()
    torch.cuda.synchronize()
    return replay


def one_line(error: BaseException) -> str:
    """The first line of an error, with its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
