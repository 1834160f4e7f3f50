"""Times what fetching adds to SpeCache's speculative step, against the same two tokens attending to its low-bit copy alone.

Both attend for a true token and a speculative one and store the true one; SpeCache also scores the tokens by the speculative query
and fetches the `fetched` best from host memory on a side stream. With random keys almost all of them are new in every step, the
most expensive case.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.agreement import OUTPUT, agree, kernels
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.decode_attention import shape_a
from benchmarks.gpu.graphs import replayed
from benchmarks.gpu.launches import supported
from benchmarks.gpu.layers import Step, bare_layers, bits_per_value, filled, forward, prompt_of
from benchmarks.gpu.turns import in_turns
from calib.runtime.layer import CompressedLayer
from calib.runtime.offload.store import OffloadStore

LOW = {"bits": 2, "group": 32, "residual": 64}


@torch.no_grad()
def fetching(bench: Bench) -> Measured:
    """Returns the figure "with fetch": the step's time with fetching over that without."""
    bench.needs_kernel("attend", "host_gather")
    heads, count, steps = shape_a(bench), bench.sizes.host_sets, []
    layers = {
        "with fetch": bare_layers("specache", heads, count, k=bench.sizes.fetched, **LOW),
        "without": bare_layers("kivi", heads, count, **LOW),
    }
    for seed in range(count):
        keys, values = prompt_of(bench, heads, seed)
        for own in layers.values():
            filled(own[seed], heads, keys, values, seed)
        steps.append(Step.drawn(bench, heads, keys, 100 + seed, width=2))
    each(layers["with fetch"], steps)  # the first fetch: each later step uses the tokens fetched by the step before
    with kernels("reference"):
        expected = each(copy.deepcopy(layers["with fetch"])[:1], steps[:1])
    with supported(bench, "attend") as launched:
        found = each(copy.deepcopy(layers["with fetch"])[:1], steps[:1])
    apart = agree("the step's attention", found, expected, OUTPUT)
    timed: dict[str, Callable[[], object]] = {}
    ways = {}
    for name, own in layers.items():
        timed[name], ways[name] = replayed(bench, partial(each, own, steps), own)
    if len({way.split(":")[0] for way in ways.values()}) > 1:  # if one could not be recorded, both run eagerly
        timed = {name: partial(each, own, steps) for name, own in layers.items()}
        ways = dict.fromkeys(layers, "eager: " + "; ".join(way for way in ways.values() if way != "graph"))
    timed["without, again"] = timed["without"]
    pairs = {"with fetch": ("with fetch", "without"), "A/A": ("without, again", "without")}
    turns = in_turns(bench, timed, pairs)
    store = layers["with fetch"][0].store
    assert store is not None
    details = {
        "k": bench.sizes.fetched,
        "low": LOW,
        "bits_per_value": round(bits_per_value(layers["with fetch"][0]), 3),
        "host_bytes": store.footprint().host,
        "distance_to_reference": apart,
        "kernels_launched": sorted(launched),
        "timed": ways,
    }
    return Measured({"with fetch": turns["ratios"]["with fetch"]}, {**details, **turns})


def each(layers: list[CompressedLayer], steps: list[Step]) -> torch.Tensor:
    """Runs a speculative step of every layer and waits for its fetches; returns the last output.

    Only the next layer's attention follows a layer's attention, while a model computes more, so a fetch has less time here.
    """
    for layer, step in zip(layers, steps, strict=True):
        output = forward(layer, step.query, step.keys, step.values, speculative=True)
    for layer in layers:
        if isinstance(layer.store, OffloadStore):
            layer.store.pool.side.wait()
    return output
