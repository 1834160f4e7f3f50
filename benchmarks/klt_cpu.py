"""Times `klt` on the CPU against `kivi` at the same bits: encoding a prompt's keys and values, and decode steps.

    python -m benchmarks.klt_cpu [--model artifacts/tiny-llama wide] [--contexts 2048 8192] [--trellis] [--write]

One process, two threads, turn by turn (`protocol.py`), with an A/A pair. Bases are random (`bases.py`). Encoding is that of all
layers' streams: ranges, codes and packing for kivi (keys by channel, values by token, groups of 32); unrotating keys, projection,
codes and packing for klt. `after` is klt with components of keys after RoPE. With `--trellis` it compares klt alone, with sizes and
predictions, and with trellis-coded levels, the latter two also in plain torch, which is used without a C compiler; one thread,
processor time.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.bases import made_up
from benchmarks.protocol import keep, load, show, turn_by_turn
from calib.kernels.dispatch import VARIABLE
from calib.runtime import Artifact, compress
from calib.runtime.methods import Geometry, build
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.encoded import encoded

RESULT, TRELLIS_RESULT = "klt_cpu.json", "klt_trellis_cpu.json"
BITS, TURNS, TOKENS = 2, 15, 4096

Entries = Mapping[str, tuple[str, Mapping[str, object]]]  # methods and options, by name in the tables

ALONE = {"size": False}  # components alone
ENTRIES: Entries = {
    "kivi": ("kivi", {}),
    "klt": ("klt", ALONE),
    "klt again": ("klt", ALONE),
    "after": ("klt", {"rope": "after"}),
}
PAIRS = {
    "klt / kivi": ("klt", "kivi"),
    "klt again / klt (A/A)": ("klt again", "klt"),
    "after / kivi": ("after", "kivi"),
}
PREDICTED = {"size": True, "predict": True, "trellis": False}
PLAIN = " in plain torch"  # suffix of an entry's name
TRELLIS_ENTRIES: Entries = {
    "klt": ("klt", ALONE),
    "predicted": ("klt", PREDICTED),
    "predicted again": ("klt", PREDICTED),
    f"predicted{PLAIN}": ("klt", PREDICTED),
    "trellis": ("klt", {**PREDICTED, "trellis": True}),
    f"trellis{PLAIN}": ("klt", {**PREDICTED, "trellis": True}),
}
TRELLIS_PAIRS = {
    "predicted / klt": ("predicted", "klt"),
    "predicted again / predicted (A/A)": ("predicted again", "predicted"),
    "trellis / predicted": ("trellis", "predicted"),
    "trellis / klt": ("trellis", "klt"),
    f"trellis{PLAIN} / predicted": (f"trellis{PLAIN}", "predicted"),
    f"trellis{PLAIN} / predicted{PLAIN}": (f"trellis{PLAIN}", f"predicted{PLAIN}"),
}


def by(name: str, function: Callable[[], object]) -> Callable[[], object]:
    """Returns an entry's `function`, wrapped to run without compiled kernels if the entry is in plain torch."""

    def plainly() -> None:
        os.environ[VARIABLE] = "reference"
        try:
            function()
        finally:
            del os.environ[VARIABLE]

    return plainly if name.endswith(PLAIN) else function


def encodings(model: PreTrainedModel, artifact: Artifact, entries: Entries) -> dict[str, Callable[[], object]]:
    """Returns functions that encode a prompt's keys and values of every layer into packed words, in pieces as stores do."""
    geometry, rotation = Geometry.of(model.config), Rotation.of(model, "")
    x = torch.randn(1, geometry.kv_heads, TOKENS, geometry.head_dim, generator=torch.Generator().manual_seed(1))
    cos, sin = rotation.along(0, TOKENS, x.device)

    def run(method: str, options: Mapping[str, object]) -> Callable[[], object]:
        given = artifact if method == "klt" else None
        plans: list[Any] = [
            build(method, {"bits": BITS, **options}).plan(layer, geometry, given) for layer in range(geometry.layers)
        ]
        streams = plans if given is None else [plan.tiers[0] for plan in plans]
        before = given is not None and plans[0].before_rope

        def every() -> None:
            for both in streams:
                keys = Rotation.rotated(x, cos, -sin) if before else x
                encoded(both.keys.transform, both.keys.codec, keys, False)
                encoded(both.values.transform, both.values.codec, x, False)

        return every

    return {name: by(name, run(*entry)) for name, entry in entries.items()}


def steps(
    model: PreTrainedModel, artifact: Artifact, context: int, entries: Entries
) -> dict[str, Callable[[], object]]:
    """Returns functions that run one decode step with caches that hold `context` tokens."""
    prompt = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    token, found = prompt[:, :1], {}
    for name, (method, options) in entries.items():
        own = {"artifact": artifact, "window": 128} if method == "klt" else {}
        cache = compress(model, method, bits=BITS, **own, **options)
        model(prompt, past_key_values=cache, logits_to_keep=1)
        found[name] = by(name, lambda cache=cache: model(token, past_key_values=cache))
    return found


@torch.no_grad()
def main() -> None:
    """Measures and prints; with --write saves the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["artifacts/tiny-llama", "wide"])
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--trellis", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1 if asked.trellis else 2)
    clock = time.process_time if asked.trellis else time.perf_counter
    entries, pairs = (TRELLIS_ENTRIES, TRELLIS_PAIRS) if asked.trellis else (ENTRIES, PAIRS)
    runs = {}
    for name in asked.model:
        model = load(name)
        artifact = made_up(model, sized=asked.trellis)
        timed = {f"encode {TOKENS} tokens": encodings(model, artifact, entries)}
        timed |= {f"decode step at {context}": steps(model, artifact, context, entries) for context in asked.contexts}
        for what, functions in timed.items():
            run = turn_by_turn(lambda _, functions=functions: functions, TURNS, pairs, clock=clock)
            show(run, f"{name}, {what}: ")
            runs[f"{name}, {what}"] = run
    if asked.write:
        keep(TRELLIS_RESULT if asked.trellis else RESULT, {"bits": BITS, "runs": runs})


if __name__ == "__main__":
    main()
