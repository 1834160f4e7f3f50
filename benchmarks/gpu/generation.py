"""Measures tokens per second of a whole model after 32k tokens, with our cache against DynamicCache and QuantizedCache.

Every cache is filled with the same random keys and values, layer by layer; then the model decodes with each in turn. "graph"
replays steps from CUDA graphs.
"""

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, QuantizedCache
from transformers.cache_utils import Cache

from benchmarks.gpu.agreement import agree, kernels
from benchmarks.gpu.bench import Bench, Measured, NotMeasured
from benchmarks.gpu.decode_attention import TIERS, fitting, shape_a
from benchmarks.gpu.graphs import replayed
from benchmarks.gpu.inputs import queries
from benchmarks.gpu.launches import supported
from benchmarks.gpu.layers import prompt_of
from benchmarks.gpu.model import SAID, ids_of, model_of, tidy
from benchmarks.gpu.turns import in_turns, in_turns_or_none
from calib.runtime import compress
from calib.runtime.cache import CompressedCache
from calib.runtime.logits import Logits

STEPS = 4  # tokens decoded per turn
LOGITS = 2**-5  # largest relative distance of logits after a few layers in bfloat16


def fill(bench: Bench, cache: Cache, rows: int, count: int) -> None:
    """Stores the same prompt, of `count` tokens and `rows` rows, in every layer of any cache."""
    heads = shape_a(bench)
    for number in range(bench.sizes.layers):
        keys, values = (part[:rows] for part in prompt_of(bench, heads, number, count))
        cache.update(keys, values, number)
        if isinstance(cache, CompressedCache):
            query = queries(keys, heads.heads, count, number)
            cache.compressed[number].attend(query, None, Logits(heads.head_dim**-0.5))


def decode(model: LlamaForCausalLM, cache: Cache, token: Tensor, steps: int = STEPS) -> Tensor:
    """Decodes `steps` tokens greedily; returns the last logits."""
    for _ in range(steps):
        logits = model(token, past_key_values=cache).logits[:, -1:]
        token = logits.argmax(-1)
    return logits


@torch.no_grad()
def against_dynamic(bench: Bench) -> Measured:
    """Returns the figures "eager" and "graph": DynamicCache's time over ours (60/40 of 4/2 bits)."""
    bench.needs_kernel("attend", "quantise")
    model, rows = model_of(bench), bench.sizes.batch
    token = ids_of(bench, rows, 1)
    with compress(model, "zipcache", **TIERS) as cache:
        fill(bench, cache, rows, bench.sizes.tokens)
        launched, apart = checked(bench, model, cache, token)
        dynamic = DynamicCache(config=model.config)
        fill(bench, dynamic, rows, bench.sizes.tokens)
        tidy(bench)
        eager = {"ours": partial(decode, model, cache, token), "dynamic": partial(own, model, dynamic, token)}
        pairs = {"speedup": ("dynamic", "ours"), "A/A": ("ours again", "ours")}
        found = in_turns(bench, {**eager, "ours again": eager["ours"]}, pairs)
        figures = {"eager": found["ratios"]["speedup"]}
    graph = _graphs(bench, model, dynamic, token, figures)
    if "ratios" in graph:
        figures["graph"] = graph["ratios"]["speedup"]
    speed = {name: round(1e3 * rows * STEPS / found["milliseconds"][name][1], 1) for name in eager}
    details = {"model": SAID, "batch": rows, "tokens": bench.sizes.tokens, "tokens_per_second": speed}
    details |= {"bits_per_value": round(cache.memory().bits_per_value, 3), "logits_apart": apart}
    return Measured(figures, {**details, "kernels_launched": launched, "eager": found, "graph": graph})


def own(model: LlamaForCausalLM, cache: Cache, token: Tensor, steps: int = STEPS) -> Tensor:
    """Decodes with transformers' own SDPA attention, as a model does while no cache of ours is attached to it."""
    held = model.config._attn_implementation_internal
    model.config._attn_implementation_internal = "sdpa"
    try:
        return decode(model, cache, token, steps)
    finally:
        model.config._attn_implementation_internal = held


def _graphs(
    bench: Bench, model: LlamaForCausalLM, dynamic: Cache, token: Tensor, kept: dict[str, list[float]]
) -> dict[str, Any]:
    """Returns the ratios of replayed steps, or the reason why there are none.

    Our steps run with `graphs=True`, as for a user, from block to block; DynamicCache's repeat one recorded step at a fixed length.
    `kept` are figures without graphs, which count if the time is over.
    """
    recorded, way = replayed(bench, partial(own, model, dynamic, token, steps=1), dynamic.layers)
    with compress(model, "zipcache", graphs=bench.on_gpu, **TIERS) as cache:
        fill(bench, cache, bench.sizes.batch, bench.sizes.tokens)
        tidy(bench)
        ours = partial(decode, model, cache, token, 1)
        if bench.on_gpu:
            for _ in range(3):  # first an eager step, then a recorded one, then a replayed one
                ours()
            if way != "graph" or cache.graphs is None or cache.graphs.refused:
                return {
                    "timed": {
                        "ours": "not recorded" if cache.graphs and cache.graphs.refused else "graph",
                        "dynamic": way,
                    }
                }
        timed: dict[str, Callable[[], object]] = {"ours": ours, "dynamic": recorded, "ours again": ours}
        found = in_turns_or_none(bench, timed, {"speedup": ("dynamic", "ours"), "A/A": ("ours again", "ours")}, kept)
        if found is None:
            return {"timed": "the time was over"}
        replays = 0 if cache.graphs is None else cache.graphs.replays
    return {"timed": {"ours": f"{replays} steps replayed", "dynamic": way}, **found}


@torch.no_grad()
def against_quanto(bench: Bench) -> Measured:
    """Returns the figure "speedup": QuantizedCache's time over ours, both at 4 bits.

    Few turns encode a block of older tokens, so the median is that of turns without encoding.
    """
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        raise NotMeasured("needs optimum-quanto")
    bench.needs_kernel("attend", "quantise")
    model, rows, count = model_of(bench), bench.sizes.batch, bench.sizes.tokens
    token, group = ids_of(bench, rows, 1), fitting(bench)["group"]
    with compress(model, "kivi", bits=4, group=group, residual=128) as cache:
        fill(bench, cache, rows, count)
        launched, apart = checked(bench, model, cache, token)
        sizes = {"nbits": 4, "axis_key": 0, "axis_value": 0, "q_group_size": group, "residual_length": 128}
        quanto = QuantizedCache("quanto", model.config, **sizes)
        fill(bench, quanto, rows, count)
        steps = {"ours": partial(decode, model, cache, token), "quanto": partial(own, model, quanto, token)}
        pairs = {"speedup": ("quanto", "ours"), "A/A": ("ours again", "ours")}
        found = in_turns(bench, {**steps, "ours again": steps["ours"]}, pairs)
    details = {"model": SAID, "batch": rows, "tokens": count, "quanto": sizes, "logits_apart": apart}
    return Measured({"speedup": found["ratios"]["speedup"]}, {**details, "kernels_launched": launched, **found})


def checked(bench: Bench, model: LlamaForCausalLM, cache: CompressedCache, token: Tensor) -> tuple[list[str], float]:
    """Compares a step's logits with plain torch's from the same stored tokens; returns launched kernels and the distance."""
    with kernels("reference"), copy.deepcopy(cache) as other:
        expected = decode(model, other, token, 1)
    with supported(bench, "attend") as launched, copy.deepcopy(cache) as other:
        found = decode(model, other, token, 1)
    return sorted(launched), agree("the logits of a step", found, expected, LOGITS)
