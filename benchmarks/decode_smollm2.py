"""Times a decode step of SmolLM2 135M with our caches, DynamicCache and QuantizedCache (quanto), on two cores.

    make smollm2-decode

The model is that of `make smollm2-model`, the artifact the committed one. It has no dictionaries: `csr` is timed only with an
`--artifact` that has them (`make smollm2`). float32, batch 1, a prompt of random tokens; every cache decodes 128 tokens in turns,
in another order each turn (`decode_cpu.py`), so that blocks are encoded as often as in a long answer. Ratios are to DynamicCache:
those of mean times, and quartiles of those within turns; `dynamic again` is the A/A pair.
"""

import argparse
import statistics
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import Cache

from benchmarks.decode_cpu import RESIDUAL, timed
from benchmarks.protocol import keep, load, quartiles
from calib.runtime import Artifact, compress

RESULT = "decode_smollm2.json"
PART = Path(__file__).parents[1] / "artifacts" / "smollm2-135m.klt.calib.safetensors"
STEPS = 8  # a turn


def caches(model: PreTrainedModel, artifact: Artifact) -> dict[str, Cache]:
    """Returns the caches by name, as in the table of docs/results/smollm2; klt, zipcache and csr with their default windows."""
    found: dict[str, Cache] = {
        "dynamic": DynamicCache(config=model.config),
        "dynamic again": DynamicCache(config=model.config),
        "quanto-4": QuantizedCache(
            "quanto", model.config, nbits=4, axis_key=0, axis_value=0, q_group_size=32, residual_length=128
        ),
        "kivi-4": compress(model, "kivi", bits=4),
        "kivi-2": compress(model, "kivi", bits=2),
        "zipcache-60": compress(model, "zipcache", ratio=0.6),
        "klt-2": compress(model, "klt", artifact=artifact, bits=2, size=False, predict=False),
        "klt-2-trellis": compress(model, "klt", artifact=artifact, bits=2),
    }
    if "keys.dictionary" in artifact.tensors:
        csr = {"sparsity": 6, "pursuit": "orthogonal", "coefficients": 4}
        found["csr-6"] = compress(model, "csr", artifact=artifact, **csr)
    return found


def measure(model: PreTrainedModel, artifact: Artifact, context: int) -> dict[str, dict[str, object]]:
    """Returns for each cache the milliseconds of a step, as quartiles over turns, and its time over DynamicCache's."""
    prompt = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    seconds = timed(model, caches(model, artifact), prompt, STEPS)
    dynamic = seconds["dynamic"]
    return {
        name: {
            "milliseconds": quartiles([1e3 * second for second in own]),
            "ratio": round(statistics.mean(own) / statistics.mean(dynamic), 3),
            "ratio_by_turn": quartiles([one / other for one, other in zip(own, dynamic, strict=True)]),
        }
        for name, own in seconds.items()
    }


def main() -> None:
    """Measures and prints; with --write saves the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that `make smollm2-model` wrote")
    parser.add_argument("--artifact", default=str(PART))
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} beside the other runs")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    model, artifact = load(asked.model), Artifact.load(asked.artifact)
    runs = {}
    for context in asked.contexts:
        runs[str(context)] = measure(model, artifact, context)
        for name, found in runs[str(context)].items():
            (_, median, _), (low, _, high) = found["milliseconds"], found["ratio_by_turn"]
            print(
                f"{context} tokens, {name:<14} {median:7.1f} ms, {found['ratio']:.2f} of dynamic ({low:.2f} ... {high:.2f})",
                flush=True,
            )
    if asked.write:
        keep(RESULT, {"model": "smollm2-135m-instruct", "dtype": "float32", "steps": RESIDUAL, "contexts": runs})


if __name__ == "__main__":
    main()
