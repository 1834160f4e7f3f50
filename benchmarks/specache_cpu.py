"""Times what speculation adds to a decode step on the CPU: SpeCache against its low-bit copy alone and against fetching all tokens.

    python -m benchmarks.specache_cpu [--model artifacts/tiny-llama wide] [--contexts 1024 4096] [--write]

Models: the embedded one, and `wide`, random weights with the KV shape of an 8B model (8 KV heads of 128; 2 layers), whose attention
is random, so that almost all k pairs are fetched anew in every step. A **plain two-token step** is a forward over the same two
tokens with the low-bit copy alone (method kivi): one token is stored, the other attends and is not stored. Results are quartiles of
the ratios within turns, in one process and in another order each turn; `rows` is how many pairs a speculative step fetched on
average, of the k that it holds.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.protocol import keep, load, show, turn_by_turn
from calib.runtime import compress
from calib.runtime.cache import CompressedCache

RESULT = "specache_cpu.json"
LOW = {"bits": 2, "group": 32, "residual": 64}
TARGET = 1.6
RATIOS = {
    "speculative step / plain two-token step": ("speculative", "two tokens"),
    "late step / plain two-token step": ("late", "two tokens"),
    "speculative step / late step": ("speculative", "late"),
    "speculative step / one-token step": ("speculative", "one token"),
    "fetching everything / speculative step": ("offload", "speculative"),
    "two tokens again / two tokens": ("two tokens again", "two tokens"),
}


def caches(model: PreTrainedModel, k: int) -> dict[str, CompressedCache]:
    """Returns the timed caches by name; the two-token step twice for the A/A pair."""
    return {
        "speculative": compress(model, "specache", k=k, **LOW),
        "late": compress(model, "specache", k=k, speculative=False, **LOW),
        "two tokens": compress(model, "kivi", **LOW),
        "two tokens again": compress(model, "kivi", **LOW),
        "one token": compress(model, "kivi", **LOW),
        "offload": compress(model, "offload"),
    }


@torch.no_grad()
def measure(model: PreTrainedModel, context: int, batch: int, k: int, turns: int, steps: int) -> dict[str, object]:
    """Returns the milliseconds of `steps` steps after `context` random tokens, and the ratios."""
    held = caches(model, k)
    prompt = torch.randint(3, model.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    tokens = {
        name: model(prompt, past_key_values=cache, logits_to_keep=1).logits.argmax(-1) for name, cache in held.items()
    }

    def run(name: str) -> None:
        cache = held[name]
        for _ in range(steps):
            given = tokens[name]
            if name.startswith("two tokens"):
                cache.sequences.speculating = True
                given = torch.cat([given, given], 1)
            logits = model(given, past_key_values=cache).logits
            tokens[name] = logits[:, :1].argmax(-1)

    timed: dict[str, Callable[[], object]] = {name: partial(run, name) for name in held}
    found = turn_by_turn(lambda turn: timed, turns, RATIOS)
    layers = held["speculative"].compressed
    positions = layers[0].store.pool.positions
    forwards = (turns + 2) * steps + 1  # the pre-decoding step fetches as well
    fetched = sum(int(layer.store.pool.fetched) for layer in layers) / (
        len(layers) * forwards * positions[..., 0].numel()
    )
    for cache in held.values():
        cache.release()
    return {"context": context, "batch": batch, "k": k, "rows": [round(fetched, 2), positions.shape[-1]], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["artifacts/tiny-llama", "wide"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="decode steps a turn")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} beside the other runs")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    runs = []
    for name in asked.model:
        model = load(name)
        for context in asked.contexts:
            for batch in asked.batches:
                run = {"model": Path(name).name, **measure(model, context, batch, asked.k, asked.turns, asked.steps)}
                runs.append(run)
                print(
                    f"{run['model']}, context {context}, batch {batch}: {run['rows'][0]} of {run['rows'][1]} pairs fetched a step"
                )
                show(run, "  ")
    if asked.write:
        keep(RESULT, {"target": TARGET, "low": LOW, "runs": runs})


if __name__ == "__main__":
    main()
