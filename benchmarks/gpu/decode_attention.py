"""Times a decode step's attention over packed tiers and over uniform codes, against the fastest SDPA on the same tokens in 16 bits.

A step is everything a layer does between the projections: attention over the tiers, the window and the new token, their merge, and
storing the new token. The steps of many layers of one cache are timed together, because layers share work that is done once per
step. The baseline only attends and stores nothing. GEAR is also compared with its authors' way: decode the whole cache, add the
corrections, attend.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.agreement import OUTPUT, agree, kernels
from benchmarks.gpu.bench import Bench, Measured, NotMeasured
from benchmarks.gpu.copy_rate import copy_rate
from benchmarks.gpu.graphs import replayed
from benchmarks.gpu.launches import device_times, supported
from benchmarks.gpu.layers import Heads, Step, bare_layers, bits_per_value, filled, forward, prompt_of
from benchmarks.gpu.sdpa import fastest_decode
from benchmarks.gpu.turns import in_turns
from calib.runtime.layer import CompressedLayer

# The speed does not depend on which tokens are salient, so few probes suffice when a cache is filled.
TIERS: dict[str, Any] = {"tiers": ((4, 0.6), (2, 0.4)), "probe_share": 0.01}

# Fewer steps are timed than a block has tokens, so that no replayed step encodes a block.
UNIFORM = {"group": 128, "residual": 128}


def shape_a(bench: Bench) -> Heads:
    """Returns shape A: grouped queries, a batch of rows."""
    return Heads(bench.sizes.batch, bench.sizes.heads, bench.sizes.kv_heads, bench.sizes.head_dim)


def one_row(bench: Bench) -> Heads:
    """Returns the shape of one row with as many KV heads as query heads (MHA)."""
    return Heads(1, bench.sizes.heads, bench.sizes.heads, bench.sizes.head_dim)


def tiers(bench: Bench) -> Measured:
    """Measures ZipCache with 60 % of the tokens at 4 bits and the rest at 2, shape A."""
    return measured(bench, "zipcache", shape_a(bench), TIERS)


def tiers_one_row(bench: Bench) -> Measured:
    """Measures the same for one row without grouped queries."""
    return measured(bench, "zipcache", one_row(bench), TIERS)


def uniform_4_bit(bench: Bench) -> Measured:
    """Measures KIVI at 4 bits, keys by channel and values by token, groups of 128."""
    return measured(bench, "kivi", shape_a(bench), {"bits": 4, **fitting(bench)})


def uniform_2_bit(bench: Bench) -> Measured:
    """Measures the same at 2 bits."""
    return measured(bench, "kivi", shape_a(bench), {"bits": 2, **fitting(bench)})


def fitting(bench: Bench) -> dict[str, int]:
    """Returns KIVI's options with groups of 128, or of head_dim if that is less."""
    return {**UNIFORM, "group": min(UNIFORM["group"], bench.sizes.head_dim)}


def gear(bench: Bench) -> Measured:
    """Measures GEAR as released: 4 bits, outliers, rank 4."""
    return measured(bench, "gear", shape_a(bench), {}, materialised=True)


def components(bench: Bench) -> Measured:
    """Measures `klt` at 2 bits: keys before RoPE are decoded and rotated by tiles; for keys after RoPE the query is transformed."""
    figures, details = dict[str, list[float]](), dict[str, Any]()
    for rope in ("before", "after"):
        try:
            found = measured(bench, "klt", shape_a(bench), {"bits": 2.0, "block": 128, "rope": rope})
        except NotMeasured as error:
            if not figures:
                raise
            details[rope] = {"reason": str(error)}
            continue
        figures |= {f"{name}, {rope} RoPE": value for name, value in found.figures.items()}
        details[rope] = found.details
    return Measured(figures, details)


@torch.no_grad()
def measured(bench: Bench, method: str, heads: Heads, options: dict[str, Any], materialised: bool = False) -> Measured:
    """Returns the figures "speedup", "share of copy" (packed bytes read over the copy rate), and "against materialise"."""
    bench.needs_kernel("attend")
    sizes, decoders = bench.sizes, []
    layers, exact = bare_layers(method, heads, sizes.caches, **options), []
    for seed in range(sizes.sets):
        exact.append(prompt_of(bench, heads, seed))
    steps = [Step.drawn(bench, heads, keys, 100 + seed) for seed, (keys, _) in enumerate(exact)]
    for number, layer in enumerate(layers):
        keys, values = exact[number % sizes.sets]
        filled(layer, heads, keys, values, number)
        if materialised and number < sizes.host_sets:  # twice the bytes: fewer sets suffice to flush the L2
            decoders.append(decoder(layer, keys, values))
    given = [steps[number % sizes.sets] for number in range(sizes.caches)]
    launched, apart = checked(bench, layers, steps[0])
    name, attention, known = fastest_decode(bench, steps[0].query, *exact[0])
    calls: dict[str, Callable[[], object]] = {
        "ours": partial(each, layers, given),
        "sdpa": partial(attend_each, attention, exact, steps),
    }
    details: dict[str, Any] = {
        "method": method,
        "options": options,
        "bits_per_value": round(bits_per_value(layers[0]), 3),
        "baseline": name,
        "baselines_milliseconds": known,
        "distance_to_reference": apart,
        "kernels_launched": launched,
    }
    ratios = {"speedup": ("sdpa", "ours"), "A/A": ("ours again", "ours")}
    if materialised:
        calls["materialise"] = partial(materialise_each, attention, decoders, steps)
        ratios["materialise"] = ("materialise", "ours")
    timed, ways = {}, {}
    for own, call in calls.items():
        timed[own], ways[own] = replayed(bench, call, layers)
    timed["ours again"] = timed["ours"]
    found = in_turns(bench, timed, ratios)
    layers_a_set = sizes.caches / sizes.sets
    figures = {"speedup": [value * layers_a_set for value in found["ratios"]["speedup"]]}
    bytes_read = sum(packed_bytes(layer) for layer in layers)
    seconds = [1e-3 * value for value in reversed(found["milliseconds"]["ours"])]
    figures["share of copy"] = [bytes_read / taken / copy_rate(bench) for taken in seconds]
    if materialised:
        share = len(decoders) / sizes.caches
        figures["against materialise"] = [value / share for value in found["ratios"]["materialise"]]
    details["device_milliseconds"] = device_times(bench, calls["ours"])
    details |= {"layers": sizes.caches, "timed": ways, "copy_bytes_per_second": copy_rate(bench)}
    details |= {"packed_bytes": bytes_read, **found}
    return Measured(figures, details)


def each(layers: Iterable[CompressedLayer], steps: Iterable[Step]) -> Tensor:
    """Runs a step of every layer; returns the last one's output."""
    for layer, step in zip(layers, steps, strict=True):
        output = forward(layer, step.query, step.keys, step.values)
    return output


def attend_each(attention: Any, exact: list[tuple[Tensor, Tensor]], steps: list[Step]) -> Tensor:
    """Runs the baseline on all sets of inputs; returns the last output."""
    for (keys, values), step in zip(exact, steps, strict=True):
        output: Tensor = attention(step.query, keys, values)
    return output


def materialise_each(attention: Any, decoders: list[Callable[[], tuple[Tensor, Tensor]]], steps: list[Step]) -> Tensor:
    """For each set decodes the whole cache with its corrections, then attends; returns the last output."""
    for decoded, step in zip(decoders, steps, strict=False):
        output: Tensor = attention(step.query, *decoded())
    return output


def decoder(layer: CompressedLayer, keys: Tensor, values: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Returns a function that decodes the first tier's tokens to 16 bits, from a block encoded by the method's codec."""
    assert layer.store is not None
    stages = layer.store.plan.tiers[0]
    parts = [
        (stages.keys.codec, stages.keys.codec.encode(keys)),
        (stages.values.codec, stages.values.codec.encode(values)),
    ]
    width, dtype = keys.shape[-1], keys.dtype

    def decoded() -> tuple[Tensor, Tensor]:
        first, second = (codec.decode(block, width).to(dtype) for codec, block in parts)
        return first, second

    return decoded


def checked(bench: Bench, layers: list[CompressedLayer], step: Step) -> tuple[list[str], float]:
    """Compares the first layer's step, in a copy of the cache, with plain torch.

    Returns the names of the launched kernels and the relative distance. Raises Disagrees if that is too large.
    """
    with kernels("reference"):
        expected = forward(copy.deepcopy(layers)[0], step.query, step.keys, step.values)
    ours = copy.deepcopy(layers)[0]
    with supported(bench, "attend") as launched:
        found = forward(ours, step.query, step.keys, step.values)
    return sorted(launched), agree("attention", found, expected, OUTPUT)


def packed_bytes(layer: CompressedLayer) -> int:
    """Returns the bytes of a layer that a step reads: codes, parameters, corrections and exact tokens; not tables and positions."""
    assert layer.store is not None
    kinds = layer.store.footprint().kinds
    return sum(
        size for kind, size in kinds.items() if kind not in ("tables", "positions", "saliency", "representatives")
    )
