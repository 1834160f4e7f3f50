"""Times decoding on the CPU with our packed cache, transformers' QuantizedCache (quanto) at the same bits, and DynamicCache.

    python -m benchmarks.decode_cpu [--model wide] [--contexts 2048 8192] [--bits 4 2] [--write]

Models: the embedded one (2 KV heads of 64, 4 layers: every operation is tiny), and `wide`, random weights with the KV shape
of an 8B model (8 KV heads of 128; 2 layers). `--write` runs both and keeps the run.

One process, two threads. For each context and bit width every cache is prefilled with the same random tokens, then all decode in
turns of a few steps, in another order each turn. Results are medians and quartiles of the ratios within turns, beside an A/A pair
(our cache twice) that shows the noise. QuantizedCache re-quantises all tokens every `residual_length` tokens; a run has as many
steps, so that one such flush is included.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import Cache

from benchmarks.protocol import keep, load, quartiles
from calib.runtime import compress

RESULT = "decode_cpu.json"
RESIDUAL = 128


def caches(model: PreTrainedModel, bits: int) -> dict[str, Cache]:
    """Returns the caches that are compared; ours twice for the A/A pair."""
    return {
        "kivi": compress(model, "kivi", bits=bits, group=32, residual=RESIDUAL),
        "kivi again": compress(model, "kivi", bits=bits, group=32, residual=RESIDUAL),
        "quanto": QuantizedCache(
            "quanto", model.config, nbits=bits, axis_key=0, axis_value=0, q_group_size=32, residual_length=RESIDUAL
        ),
        "dynamic": DynamicCache(config=model.config),
    }


@torch.no_grad()
def timed(model: PreTrainedModel, held: dict[str, Cache], prompt: torch.Tensor, steps: int) -> dict[str, list[float]]:
    """Returns the seconds of a step of each cache, by turn: RESIDUAL tokens after the `prompt`, decoded in turns of `steps`.

    A cache that encodes every RESIDUAL tokens, or more often, encodes as often as in a long answer."""
    token = {
        name: model(prompt, past_key_values=cache, logits_to_keep=1).logits.argmax(-1) for name, cache in held.items()
    }
    for name, cache in held.items():  # warm-up
        token[name] = model(token[name], past_key_values=cache).logits[:, -1:].argmax(-1)
    seconds: dict[str, list[float]] = {name: [] for name in held}
    shuffled = random.Random(0)
    for _ in range(RESIDUAL // steps):
        # In another order each turn: after a large cache the next one finds the processor's caches filled with it.
        for name in shuffled.sample(list(held), len(held)):
            cache = held[name]
            start = time.perf_counter()
            for _ in range(steps):
                token[name] = model(token[name], past_key_values=cache).logits[:, -1:].argmax(-1)
            seconds[name].append((time.perf_counter() - start) / steps)
    for cache in held.values():
        if hasattr(cache, "release"):
            cache.release()
    return seconds


def measure(model: PreTrainedModel, context: int, bits: int, batch: int, steps: int) -> dict[str, Any]:
    """Returns the median tokens per second of each cache, and quartiles of the ratios within turns."""
    prompt = torch.randint(3, model.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    seconds = timed(model, caches(model, bits), prompt, steps)
    ratios = {
        f"{other} / kivi": quartiles([b / a for a, b in zip(seconds["kivi"], seconds[other], strict=True)])
        for other in ("quanto", "dynamic", "kivi again")
    }
    speed = {name: batch / statistics.median(taken) for name, taken in seconds.items()}
    return {"context": context, "bits": bits, "batch": batch, "tokens_per_second": speed, "time_ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["artifacts/tiny-llama", "wide"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="decode steps a turn")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} beside the other runs")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for name in asked.model:
        model = load(name)
        for context in asked.contexts:
            for bits in asked.bits:
                row = {"model": Path(name).name, **measure(model, context, bits, asked.batch, asked.steps)}
                rows.append(row)
                speed = ", ".join(f"{cache} {value:.1f}" for cache, value in row["tokens_per_second"].items())
                ratio = ", ".join(
                    f"{pair} {value[1]:.2f} [{value[0]:.2f}, {value[2]:.2f}]"
                    for pair, value in row["time_ratio"].items()
                )
                print(
                    f"{row['model']}, context {context}, {bits} bit: tokens/s {speed}; time ratios {ratio}", flush=True
                )
    if asked.write:
        keep(RESULT, {"rows": rows})


if __name__ == "__main__":
    main()
