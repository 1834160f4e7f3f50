"""Times the host's part of a decode step without graphs: the code between a model's keys and the launches of our kernels.

Every launch of our kernels is replaced by a count. Operators of torch run on small CPU tensors: in the measured steps these are
views and allocations, and masks and positions that the first layer computes. The time of a launch in Triton and CUDA, and the
model's own layers, are not included.
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
FIRST, STEPS = 10, 60  # first steps, which are left out, and all steps


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Context in which launches of our kernels are counted by kernel and not run.

    Exceptions are kernels whose results decide where tokens are stored and how wide parameters are.
    """
    from triton.runtime.interpreter import InterpretedFunction

    found: Counter[str] = Counter()
    run = InterpretedFunction.run

    def counted(kernel: Any, *arguments: Any, **options: Any) -> None:
        found[kernel.fn.__name__] += 1
        if kernel.fn.__name__ == "largest":  # chooses the tokens of each tier when a chunk is encoded
            run(kernel, *arguments, **options)
        if kernel.fn.__name__ == "channel_extremes":  # decides the width of parameters; any numbers will do
            arguments[2].zero_()

    InterpretedFunction.run = counted
    try:
        yield found
    finally:
        InterpretedFunction.run = run


def model_of(layers: int) -> LlamaForCausalLM:
    """Returns a model with `layers` layers, of which only the attention modules are used."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": layers}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval().bfloat16()


def drawn(rows: int, heads: int, tokens: int) -> Tensor:
    """Returns random queries, keys or values, bfloat16 `[rows, heads, tokens, HEAD_DIM]`."""
    return torch.randn(rows, heads, tokens, HEAD_DIM).bfloat16()


@torch.no_grad()
def step(model: LlamaForCausalLM, method: str, options: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Times the steps after prompts of these `lengths`.

    Returns `microseconds`, the sum of the layers' medians; `mean_microseconds`, the mean of steps that do not encode (those that
    record launches included); `launches` of most steps; `taped`, the share of layers and steps that repeat recorded launches; and
    if any step encodes, the mean time of such steps and the most launches of one.
    """
    modules, rows = [layer.self_attn for layer in model.model.layers], len(lengths)
    artifact = made_up(model, sized=bool(options.get("predict"))) if method == "klt" else None
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    taken: list[list[float]] = [[] for _ in modules]
    launches = []
    gc.collect()
    gc.freeze()  # so that the garbage collector does not walk the objects of imports again and again
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
