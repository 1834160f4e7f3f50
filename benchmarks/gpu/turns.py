"""Interleaved timing on a GPU: every turn runs every step, in another order each time; figures are medians of ratios within turns.

`benchmarks/protocol.py` does the same on a CPU. Here device events time a step, and a step runs through all inputs in rotation,
so that none of them is still in the L2 in the next turn.
"""

import random
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.gpu.bench import Bench, NotMeasured
from benchmarks.protocol import quartiles

WARM, LEAST = 2, 5  # warm-up turns, which are not kept, and the least number of turns for a figure


Ratios = Mapping[str, tuple[str, str]]


def milliseconds(bench: Bench, step: Callable[[], object]) -> float:
    """Returns the milliseconds of one call, by device events; on a CPU by the host's clock."""
    if not bench.on_gpu:
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_turns_or_none(
    bench: Bench, steps: Mapping[str, Callable[[], object]], ratios: Ratios, kept: Mapping[str, object]
) -> dict[str, dict[str, list[float]]] | None:
    """Returns the result of `in_turns`; None if the time is over but earlier figures, `kept`, exist."""
    try:
        return in_turns(bench, steps, ratios)
    except NotMeasured:
        if not kept:
            raise
        return None


def in_turns(
    bench: Bench, steps: Mapping[str, Callable[[], object]], ratios: Ratios
) -> dict[str, dict[str, list[float]]]:
    """Returns quartiles of every step's milliseconds and of `ratios` (numerator, denominator), in up to `sizes.turns` turns.

    If the time is over, only the turns up to the `LEAST`-th follow. Raises NotMeasured if they take more than `bench.LATE` seconds.
    """
    shuffled = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(bench.sizes.turns + WARM):
        if bench.is_late or (bench.is_over and turn >= WARM + LEAST):
            break
        for name in shuffled.sample(list(steps), len(steps)):
            taken = milliseconds(bench, steps[name])
            if turn >= WARM:
                found[name].append(taken)
    whole = min(map(len, found.values()))
    if whole < LEAST:
        raise NotMeasured(f"its time was over after {whole} turns; {LEAST} are needed")
    paired = {
        name: [above / below for above, below in zip(found[one][:whole], found[other][:whole], strict=True)]
        for name, (one, other) in ratios.items()
    }
    return {
        "milliseconds": {name: quartiles(values[:whole]) for name, values in found.items()},
        "ratios": {name: quartiles(values) for name, values in paired.items()},
        "turns": {"kept": [whole]},
    }
