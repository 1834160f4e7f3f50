"""Runs every row in every turn, in another order each time, so that disturbances affect both sides of a ratio of times."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from calib.bench.bench_model import BenchModel
from calib.bench.open_cache import OpenCache

PAUSE = 0.1  # seconds before a timing on the CPU, since other libraries' threads spin for a while and slow torch down

Quartiles = list[float]
clock = time.perf_counter


def seconds(bench_model: BenchModel, step: Callable[[], object]) -> float:
    """Returns the seconds of one call of `step`, including its work on the device."""
    ready(bench_model.device)
    start = clock()
    step()
    if bench_model.peak.on_gpu:
        torch.cuda.synchronize(bench_model.device)
    return clock() - start


def done(device: torch.device) -> None:
    """Waits until all streams of a GPU have finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ready(device: torch.device) -> None:
    """Prepares for a timing: wait for a GPU, or on a CPU pause and wake torch's threads, which takes as long as a small step."""
    done(device)
    if device.type == "cuda":
        return
    time.sleep(PAUSE)
    torch.ones(2**17).add_(1)


def interleaved(seed: int, turns: int, names: Callable[[], Sequence[str]]) -> Iterator[tuple[int, str]]:
    """Yields (turn, name) for all `names()` at the beginning of each turn, in another random order each turn."""
    shuffled = random.Random(seed)
    for turn in range(turns):
        found = list(names())
        for name in shuffled.sample(found, len(found)):
            yield turn, name


def shares(tokens: int, turns: int) -> list[int]:
    """Splits a number of tokens over the turns as evenly as possible."""
    return [tokens * (turn + 1) // turns - tokens * turn // turns for turn in range(turns)]


def decode_interleaved(
    bench_model: BenchModel, rows: Mapping[str, OpenCache], advance: Callable[[str], None]
) -> dict[str, list[float]]:
    """Returns the seconds per decode step of every open row, one figure for each turn.

    The rows must be prefilled; the first step of each row is not timed.
    """
    request = bench_model.request
    for row in rows.values():
        row.decode(1)
    steps, found = shares(request.new_tokens, request.turns), {name: list[float]() for name in rows}
    for turn, name in interleaved(request.seed, request.turns, lambda: list(rows)):
        found[name].append(seconds(bench_model, partial(rows[name].decode, steps[turn])) / steps[turn])
        advance(name)
    return found


def quartiles(values: Sequence[float]) -> Quartiles:
    """Returns lower quartile, median and upper quartile."""
    return [float(value) for value in np.percentile(values, (25, 50, 75))]


def speedup(baseline: Sequence[float], values: Sequence[float]) -> Quartiles:
    """Returns the quartiles of the ratio of the baseline's time to the row's, turn by turn; above 1 the row is faster."""
    return quartiles([above / below for above, below in zip(baseline, values, strict=True)])
