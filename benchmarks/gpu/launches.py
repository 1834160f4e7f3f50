"""Records which kernels ran and for how long, so that a figure cannot come from plain torch when a kernel declined the inputs.

python -m benchmarks.gpu.launches [METHOD ...]     # launches of a decode step in a layer, counted on any machine
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench, NotMeasured


@contextmanager
def supported(bench: Bench, *operations: str) -> Iterator[set[str]]:
    """Context that collects the names of the Triton kernels launched in it.

    Raises NotMeasured at the end if any of the `operations` launched no kernel. In a dry run nothing is collected.
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


def by_kernel(bench: Bench, call: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """Returns milliseconds and launches of each kernel of a call on the device; in a dry run of the CPU's operations.

    Once used, the profiler slows down every later launch of the process.
    """
    call()
    activity = ProfilerActivity.CUDA if bench.on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        call()
        if bench.on_gpu:
            torch.cuda.synchronize()
    taken = {
        event.key: (event.self_device_time_total if bench.on_gpu else event.self_cpu_time_total, event.count)
        for event in seen.key_averages()
    }
    return {name: (microseconds / 1e3, count) for name, (microseconds, count) in taken.items() if microseconds}


def device_times(bench: Bench, call: Callable[[], object]) -> dict[str, float]:
    """Returns milliseconds in the 12 longest kernels of a call, the longest first, and of all as "all", without gaps between them.

    Empty unless `CALIB_GPU_PROFILE=1`.
    """
    if not bench.on_gpu or os.environ.get("CALIB_GPU_PROFILE") != "1":
        return {}
    taken = {name[:80]: milliseconds for name, (milliseconds, _) in by_kernel(bench, call).items()}
    longest = sorted(taken, key=taken.__getitem__, reverse=True)[:12]
    return {"all": round(sum(taken.values()), 4)} | {name: round(taken[name], 4) for name in longest}


def main(names: list[str]) -> None:
    """Prints the launches of a decode step of these methods, or of all (`launch_counts.py`)."""
    os.environ |= {"CALIB_KERNELS": "triton", "TRITON_INTERPRET": "1"}  # before a kernel is imported
    from benchmarks.gpu.launch_counts import METHODS, table

    if unknown := sorted(set(names) - set(METHODS)):
        sys.exit(f"no launches are counted of {', '.join(unknown)}; name some of {', '.join(METHODS)}")
    for line in table({name: METHODS[name] for name in names or METHODS}):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
