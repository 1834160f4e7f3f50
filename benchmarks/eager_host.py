"""The host's part of a decode step that no graph replays: what runs between a model's keys and the launches of our kernels.

Every launch of ours is replaced by a count. Torch's operators run on small tensors of the CPU: in the steps that are measured
these are views and allocations, and masks and positions that the first layer works out. Not in it: what Triton and CUDA take
for a launch, and the model's own layers.
"""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bases import made_up
from calib.runtime import compress
from calib.runtime.attention import attention

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
FIRST, STEPS = 10, 60  # steps that are left out, and all


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Nothing of ours runs inside, but for what says where tokens lie and how wide their parameters are, and what would have run is
    counted, by kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    found: Counter[str] = Counter()
    run = InterpretedFunction.run

    def counted(kernel: Any, *arguments: Any, **options: Any) -> None:
        found[kernel.fn.__name__] += 1
        if kernel.fn.__name__ == "largest":  # which tokens go to which tier, when a chunk is encoded
            run(kernel, *arguments, **options)
        if kernel.fn.__name__ == "channel_extremes":  # how wide parameters are: numbers, whatever they say
            arguments[2].zero_()

    InterpretedFunction.run = counted
    try:
        yield found
    finally:
        InterpretedFunction.run = run


def model_of(layers: int) -> LlamaForCausalLM:
    """So many layers, whose attention is all that is called."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": layers}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval().bfloat16()


def drawn(rows: int, heads: int, tokens: int) -> Tensor:
    """Queries, keys or values as the model would make them."""
    return torch.randn(rows, heads, tokens, HEAD_DIM).bfloat16()


@torch.no_grad()
def step(model: LlamaForCausalLM, method: str, options: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Of a step behind prompts of these `lengths`: microseconds, its layers' medians added up; their mean over all steps but those
    that encode, so with those in which launches are recorded; launches of most steps; the share of layers that launched what
    they had launched before, of all steps; and where any steps encode, their mean and how often they launch."""
    modules, rows = [layer.self_attn for layer in model.model.layers], len(lengths)
    artifact = made_up(model, sized=bool(options.get("predict"))) if method == "klt" else None
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    taken: list[list[float]] = [[] for _ in modules]
    launches = []
    gc.collect()
    gc.freeze()  # what imports have made is not walked again and again
    with counted_launches() as counts, compress(model, method, artifact, **options) as cache:
        for number in range(STEPS + 1):
            width = 1 if number else max(lengths)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1) if number else mask
            query, (keys, values) = drawn(rows, HEADS, width), (drawn(rows, KV_HEADS, width) for _ in range(2))
            counts.clear()
            for layer, module in enumerate(modules):
                begun = time.perf_counter()
                held = cache.update(keys, values, layer)
                attention(module, query, *held, mask, scaling=HEAD_DIM**-0.5)
                if number > FIRST:
                    taken[layer].append(time.perf_counter() - begun)
            launches.append(tuple(counts.items()))
        taped = cache.sequences.taped.launched
    gc.unfreeze()
    usual = {"sum_rows", *dict(statistics.mode(launches[FIRST:]))}
    of_steps, encoding = list[float](), list[float]()
    for own, found in zip(zip(*taken, strict=True), launches[FIRST + 1 :], strict=True):
        (of_steps if usual >= {*dict(found)} else encoding).append(sum(own))
    most = max(launches[FIRST + 1 :], key=lambda found: sum(dict(found).values()))
    encodes = {} if not encoding else {
        "encoding_microseconds": round(1e6 * statistics.mean(encoding), 1),
        "encoding_launches": sum(dict(most).values()),
    }  # fmt: skip
    return encodes | {
        "microseconds": round(1e6 * sum(map(statistics.median, taken)), 1),
        "mean_microseconds": round(1e6 * statistics.mean(of_steps), 1),
        "launches": dict(statistics.mode(launches[FIRST:])),
        "taped": round(taped / STEPS / len(modules), 2),
    }
