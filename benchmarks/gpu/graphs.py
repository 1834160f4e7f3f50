"""Records a step's launches in a CUDA graph and replays them, so that only the device's own time is measured."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from calib.runtime.memory import tensors

# Pinned host memory that every replay of a graph copies to the device again, so it is never freed.
_kept: list[Tensor] = []


def replayed(bench: Bench, step: Callable[[], object], holder: Any) -> tuple[Callable[[], object], str]:
    """Returns a function that replays `step` from a graph, and "graph"; or `step` itself and the reason ("eager: ...").

    A step that advances a length on the host is recorded at one length: every replay writes the same slots again. Work on the
    host, and work of other steps only (encoding a full block), is not in the graph. Tensors of `holder` that the step replaces
    are kept alive, because replays still read them.
    """
    if not bench.on_gpu:
        return step, "eager: no GPU"
    stream = torch.cuda.current_stream()
    try:
        return _recorded(step, holder), "graph"
    except Exception as error:  # whatever the reason, the step runs as it is
        torch.cuda.set_stream(stream)  # torch leaves the recording's stream only if its end succeeds
        torch.cuda.synchronize()
        return step, f"eager: {all_lines(error)}"


def _recorded(step: Callable[[], object], holder: Any) -> Callable[[], object]:
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    gc.collect()  # no memory may be freed during the recording, as that would wait for the device
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


def all_lines(error: BaseException) -> str:
    """Returns `one_line` of an error and of those before it: what ends a recording hides behind torch's error at its end."""
    before = "" if error.__context__ is None else f"{all_lines(error.__context__)}, then "
    return before + one_line(error)


def one_line(error: BaseException) -> str:
    """Returns the type of an error with the first line of its message, if it has one."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
