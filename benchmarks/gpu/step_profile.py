"""Measures how a decode step's time on the device is divided between our kernels and torch's, and the time of the host.

At shape A, with kernels launched one by one: a graph launches the same kernels, so it differs only in the gaps between them. The
layers of a cache share work done once per step; every figure is the mean of the layers.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.decode_attention import TIERS, each, fitting, shape_a
from benchmarks.gpu.launches import by_kernel, supported
from benchmarks.gpu.layers import Step, bare_layers, filled, prompt_of

MOST = 24  # most kernels listed
HOSTS = 11  # steps timed on the host
LAYERS = 8


@torch.no_grad()
def step_profile(bench: Bench) -> Measured:
    """Returns the figures "METHOD, ours": the share of our kernels in the device's time of a step; times are in the details."""
    bench.needs_kernel("attend", "quantise")
    heads, methods = shape_a(bench), {"zipcache": TIERS, "kivi": {"bits": 4, **fitting(bench)}, "gear": {}, "mikv": {}}
    keys, values = prompt_of(bench, heads, 0)
    step = Step.drawn(bench, heads, keys, 100)
    figures, details = {}, {}
    for method, options in methods.items():
        layers = bare_layers(method, heads, LAYERS, **options)
        for layer in layers:
            filled(layer, heads, keys, values, 0)
        call = partial(each, layers, [step] * LAYERS)
        with supported(bench, "attend") as launched:
            call()
        taken = by_kernel(bench, call)
        device = sum(milliseconds for milliseconds, _ in taken.values())
        ours = {name: own for name, own in taken.items() if name in launched}
        share = sum(milliseconds for milliseconds, _ in ours.values()) / device
        figures[f"{method}, ours"] = [share] * 3
        longest = sorted(taken, key=lambda name: taken[name][0], reverse=True)[:MOST]
        details[method] = {
            "device_milliseconds": round(device / LAYERS, 4),
            "host_milliseconds": host_milliseconds(bench, call),
            "launches": {
                "ours": sum(n for _, n in ours.values()) / LAYERS,
                "all": sum(n for _, n in taken.values()) / LAYERS,
            },
            "kernels": {
                name: {"milliseconds": round(taken[name][0] / LAYERS, 4), "launches": taken[name][1] / LAYERS}
                for name in longest
            },
        }
    return Measured(figures, details)


def host_milliseconds(bench: Bench, call: Callable[[], object]) -> float:
    """Returns the host's median milliseconds to launch a layer's step, without waiting for the device."""
    taken = []
    for _ in range(HOSTS):
        if bench.on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return round(sorted(taken)[HOSTS // 2] / LAYERS, 4)
