"""Which kernels ran, and how long: a figure of ours must not come from plain torch because a kernel declined the inputs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench, NotMeasured


@contextmanager
def served(bench: Bench, *operations: str) -> Iterator[set[str]]:
    """Collects the names of the Triton kernels launched inside.

    Raises NotMeasured at the end where no kernel of one of the `operations` was among them. Nothing is looked for in a dry run.
    """
    launched: set[str] = set()
    if not bench.on_gpu:
        yield launched
        return
    import triton

    modules: set[str] = set()
    run = triton.runtime.JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules.add(self.fn.__module__)
        launched.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    triton.runtime.JITFunction.run = noted
    try:
        yield launched
    finally:
        triton.runtime.JITFunction.run = run
    for operation in operations:
        if not any(module.startswith(f"calib.kernels.{operation}.") for module in modules):
            raise NotMeasured(f"the kernel of {operation} did not serve these inputs (plain torch ran)")


def device_times(bench: Bench, call: Callable[[], object], most: int = 12) -> dict[str, float]:
    """Milliseconds that the device spends in each kernel of a call, the longest first, and "all" of them; no gaps between them.

    Only with `CALIB_GPU_PROFILE=1`: a profiler that was there once goes on costing every later launch of the process.
    """
    if not bench.on_gpu or os.environ.get("CALIB_GPU_PROFILE") != "1":
        return {}
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    taken = {event.key[:80]: event.self_device_time_total / 1e3 for event in seen.key_averages()}
    longest = sorted(taken, key=taken.__getitem__, reverse=True)[:most]
    return {"all": round(sum(taken.values()), 4)} | {name: round(taken[name], 4) for name in longest}
