"""Every row in every turn, in another order each time, so that what slows the machine down slows both sides of a ratio."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from calib.bench.bench_model import BenchModel
from calib.bench.open_cache import OpenCache

PAUSE = 0.1  # seconds before a turn on the CPU: other libraries' threads go on spinning for a while, at torch's cost

Quartiles = list[float]
clock = time.perf_counter


def seconds(bench_model: BenchModel, step: Callable[[], object]) -> float:
    """Of one call, with everything that it asked of the device."""
    ready(bench_model.device)
    start = clock()
    step()
    if bench_model.peak.on_gpu:
        torch.cuda.synchronize(bench_model.device)
    return clock() - start


def done(device: torch.device) -> None:
    """Waits until nothing is under way on a GPU, on no stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ready(device: torch.device) -> None:
    """Nothing is under way, and the threads are awake: waking them takes as long as a small step."""
    done(device)
    if device.type == "cuda":
        return
    time.sleep(PAUSE)
    torch.ones(2**17).add_(1)


def interleaved(seed: int, turns: int, names: Callable[[], Sequence[str]]) -> Iterator[tuple[int, str]]:
    """(turn, name) of all `names()` there are at a turn's beginning, in another order each turn."""
    shuffled = random.Random(seed)
    for turn in range(turns):
        found = list(names())
        for name in shuffled.sample(found, len(found)):
            yield turn, name


def shares(tokens: int, turns: int) -> list[int]:
    """Tokens of each turn: as even as whole numbers are."""
    return [tokens * (turn + 1) // turns - tokens * turn // turns for turn in range(turns)]


def decode_interleaved(
    bench_model: BenchModel, rows: Mapping[str, OpenCache], advance: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds a step of every open row, one figure a turn. The rows' prompts are in; a first step of each is not kept."""
    request = bench_model.request
    for row in rows.values():
        row.decode(1)
    steps, found = shares(request.new_tokens, request.turns), {name: list[float]() for name in rows}
    for turn, name in interleaved(request.seed, request.turns, lambda: list(rows)):
        found[name].append(seconds(bench_model, partial(rows[name].decode, steps[turn])) / steps[turn])
        advance(name)
    return found


def quartiles(values: Sequence[float]) -> Quartiles:
    """Lower quartile, median, upper quartile."""
    return [float(value) for value in np.percentile(values, (25, 50, 75))]


def speedup(baseline: Sequence[float], values: Sequence[float]) -> Quartiles:
    """Quartiles of the baseline's time over a row's, turn by turn: above 1 the row is faster."""
    return quartiles([above / below for above, below in zip(baseline, values, strict=True)])
