"""Times a layer's decode step for several numbers of tokens: its fixed cost, and the cost per token."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.decode_attention import TIERS, each, fitting, shape_a
from benchmarks.gpu.graphs import replayed
from benchmarks.gpu.layers import Step, bare_layers, filled, prompt_of
from benchmarks.gpu.turns import in_turns_or_none

LAYERS = 4  # layers of a cache, whose steps are timed together
SHARES = (1 / 16, 1 / 4, 1 / 2, 1)  # of the tokens of shape A


@torch.no_grad()
def by_tokens(bench: Bench) -> Measured:
    """Returns figures such as "zipcache, 2048 tokens": milliseconds of a layer's step."""
    bench.needs_kernel("attend", "quantise")
    heads, known = shape_a(bench), {"zipcache": TIERS}
    known |= {f"kivi, {bits} bits": {"bits": bits, **fitting(bench)} for bits in (4, 2)}
    figures: dict[str, list[float]] = {}
    timed: dict[str, str] = {}
    for name, given in known.items():
        calls = {}
        for share in SHARES:
            one = replace(bench, sizes=replace(bench.sizes, tokens=int(share * bench.sizes.tokens)))
            keys, values = prompt_of(one, heads, 0)
            layers = bare_layers(name.split(",")[0], heads, LAYERS, **given)
            for layer in layers:
                filled(layer, heads, keys, values, 0)
            own = f"{name}, {one.sizes.tokens} tokens"
            step = Step.drawn(one, heads, keys, 100)
            calls[own], timed[own] = replayed(bench, partial(each, layers, [step] * LAYERS), layers)
        found = in_turns_or_none(bench, calls, {}, figures)
        if found is None:
            break
        for own, taken in found["milliseconds"].items():
            figures[own] = [milliseconds / LAYERS for milliseconds in taken]
    return Measured(figures, {"layers": LAYERS, "timed": timed})
