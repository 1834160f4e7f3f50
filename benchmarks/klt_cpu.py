"""Speed of `klt` on the CPU beside `kivi` with codes of the same bits: encoding a prompt's keys and values, and decode steps.

    python benchmarks/klt_cpu.py [--model artifacts/tiny-llama wide] [--contexts 2048 8192] [--write]

One process, two threads, turn by turn (`protocol.py`), with an A/A pair. Bases are random, spectra fall by e^-8 over a head: what
is timed does not depend on what a basis is of. Encoding is of all layers' streams: ranges, codes and packing for kivi (keys by
channel, values by token, groups of 32); keys turned back, projection, codes and packing for klt. `after` is klt with
components of keys after RoPE.
"""

import argparse
from collections.abc import Callable

import torch
from protocol import keep, load, show, turn_by_turn
from transformers import PreTrainedModel

from calib.runtime import Artifact, compress
from calib.runtime.fingerprint import fingerprint
from calib.runtime.methods import Geometry, build
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.encoded import encoded

RESULT = "klt_cpu.json"
BITS, TURNS, TOKENS = 2, 15, 4096
GAUSSIAN = (1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)


def made_up(model: PreTrainedModel) -> Artifact:
    """Bases for the model's sizes."""
    geometry, draw = Geometry.of(model.config), torch.Generator().manual_seed(0)
    shape, tensors = (geometry.layers, geometry.kv_heads, geometry.head_dim), {}
    for stem in ("keys.klt", "values.klt", "keys.klt.before"):
        axes = torch.linalg.qr(torch.randn(*shape, shape[-1], generator=draw)).Q
        worth = torch.exp(-torch.linspace(0, 4, shape[-1]) + 0.3 * torch.randn(*shape[:2], 1, generator=draw))
        tensors[f"{stem}.mean"] = torch.zeros(shape)
        tensors[f"{stem}.basis"] = worth[..., None] * axes
        tensors[f"{stem}.steps"] = worth[..., None] * torch.tensor(GAUSSIAN)
        errors = torch.tensor([1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000876])
        tensors[f"{stem}.errors"] = worth[..., None].square() * errors
    return Artifact(tensors, fingerprint(model), {})


def encodings(model: PreTrainedModel, artifact: Artifact) -> dict[str, Callable[[], object]]:
    """A prompt's keys and values of every layer into packed words, in pieces as stores encode them."""
    geometry, rotation = Geometry.of(model.config), Rotation.of(model, "")
    x = torch.randn(1, geometry.kv_heads, TOKENS, geometry.head_dim, generator=torch.Generator().manual_seed(1))
    cos, sin = rotation.along(0, TOKENS, x.device)

    def run(name: str, given: Artifact | None, **options: str) -> Callable[[], object]:
        plans = [
            build(name, {"bits": BITS, **options}).plan(layer, geometry, given) for layer in range(geometry.layers)
        ]
        streams = plans if given is None else [plan.tiers[0] for plan in plans]
        before = given is not None and plans[0].before_rope

        def every() -> None:
            for both in streams:
                keys = Rotation.turned(x, cos, -sin) if before else x
                encoded(both.keys.transform, both.keys.codec, keys, False)
                encoded(both.values.transform, both.values.codec, x, False)

        return every

    return {
        "kivi": run("kivi", None),
        "klt": run("klt", artifact),
        "klt again": run("klt", artifact),
        "after": run("klt", artifact, rope="after"),
    }


def steps(model: PreTrainedModel, artifact: Artifact, context: int) -> dict[str, Callable[[], object]]:
    """One decode step of caches that hold `context` tokens."""
    prompt = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    token, found = prompt[:, :1], {}
    for name, method, options in (
        ("kivi", "kivi", {}),
        ("klt", "klt", {"artifact": artifact, "window": 128}),
        ("klt again", "klt", {"artifact": artifact, "window": 128}),
        ("after", "klt", {"artifact": artifact, "window": 128, "rope": "after"}),
    ):
        cache = compress(model, method, bits=BITS, **options)
        model(prompt, past_key_values=cache, logits_to_keep=1)
        found[name] = lambda cache=cache: model(token, past_key_values=cache)
    return found


@torch.no_grad()
def main() -> None:
    """Measures, prints, and writes the run where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["artifacts/tiny-llama", "wide"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    pairs = {
        "klt / kivi": ("klt", "kivi"),
        "klt again / klt (A/A)": ("klt again", "klt"),
        "after / kivi": ("after", "kivi"),
    }
    runs = {}
    for name in asked.model:
        model = load(name)
        artifact = made_up(model)
        timed = {f"encode {TOKENS} tokens": encodings(model, artifact)}
        timed |= {f"decode step at {context}": steps(model, artifact, context) for context in asked.contexts}
        for what, functions in timed.items():
            run = turn_by_turn(lambda _, functions=functions: functions, TURNS, pairs)
            show(run, f"{name}, {what}: ")
            runs[f"{name}, {what}"] = run
    if asked.write:
        keep(RESULT, {"bits": BITS, "runs": runs})


if __name__ == "__main__":
    main()
