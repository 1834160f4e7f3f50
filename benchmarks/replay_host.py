"""Times the host's work in a decode step of 32 layers, replayed from a graph and without graphs, in microseconds, and counts how
many steps are replayed. Writes benchmarks/results/replay_host.json.

    TRITON_INTERPRET=1 python -m benchmarks.replay_host --write
    TRITON_INTERPRET=1 python -m benchmarks.replay_host --eager klt

A graph's launch is replaced by nothing, so no device and no matrix products of the model are included: a step computes lengths,
slots and page numbers, copies them to the graph's inputs, and copies the result. In a step without a graph launches are only
counted (`eager_host.py`). Rows are of equal length, or all of different lengths. Each figure is the least of several runs, because
other programs may run on the machine.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import eager_host
from benchmarks.bases import made_up
from benchmarks.protocol import keep, quartiles
from calib.runtime import compress
from calib.runtime.graphs import step_graphs

LAYERS, ROWS, PROMPT, STEPS = 32, 8, 262, 60
COUNTED = 600  # steps of a generation in which replays are counted
HELD = 4_100  # tokens of the caches whose memory is compared
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"bits": 4}, "kivi": {"bits": 2, "residual": 128}, "zipcache": {}, "gear": {}, "mikv": {}, "h2o": {},
}  # fmt: skip


EAGER: dict[str, dict[str, Any]] = {
    "rtn": {"bits": 4},
    "kivi": {"bits": 2, "residual": 128},
    "klt": {"bits": 2.0, "predict": True},
    "zipcache": {},
}
RUNS = 5


class Nothing:
    """Replaces a graph: has a step's result, and a replay that launches nothing."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.result = step()

    def replay(self) -> None:
        """Does nothing."""


def model_of(layers: int = LAYERS, head_dim: int = 32) -> LlamaForCausalLM:
    """Returns a model with `layers` tiny layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        intermediate_size=64,
        num_hidden_layers=layers,
        vocab_size=100,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def steps(
    model: LlamaForCausalLM, method: str, options: dict[str, Any], lengths: list[int], count: int
) -> list[float | None]:
    """Returns the microseconds of `count` steps after prompts of these `lengths`; None for a step that is not replayed."""
    ids = torch.randint(3, 100, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    token, found = torch.full((len(lengths), 1), 5), list[float | None]()
    artifact = made_up(model, sized=True) if method == "klt" else None
    with compress(model, method, artifact, graphs=True, **options) as cache:
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        for _ in range(count):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions, replays = mask.sum(-1, keepdim=True) - 1, cache.graphs.replays
            begun = time.perf_counter()
            model(input_ids=token, attention_mask=mask, position_ids=positions, past_key_values=cache)
            taken = time.perf_counter() - begun
            found.append(taken * 1e6 if cache.graphs.replays > replays else None)
    return found


def microseconds(model: LlamaForCausalLM, method: str, lengths: list[int]) -> list[float]:
    """Returns quartiles of the microseconds of replayed steps, without the first ones."""
    taken = steps(model, method, METHODS[method], lengths, STEPS)
    return quartiles([own for number, own in enumerate(taken) if own is not None and number > 10])


def replayed(model: LlamaForCausalLM, method: str, options: dict[str, Any], lengths: list[int]) -> float:
    """Returns the share of replayed steps in a long generation."""
    taken = steps(model, method, options, lengths, COUNTED)
    return round(1 - taken.count(None) / COUNTED, 3)


@torch.inference_mode()
def room(model: LlamaForCausalLM, method: str, options: dict[str, Any]) -> float:
    """Returns the bytes of a cache of `HELD` tokens with graphs, over its bytes without."""
    ids = torch.randint(3, 100, (1, HELD), generator=torch.Generator().manual_seed(1))
    artifact, found = made_up(model, sized=True) if method == "klt" else None, []
    for graphs in (True, False):
        with compress(model, method, artifact, graphs=graphs, **options) as cache:
            model(input_ids=ids, past_key_values=cache)
            model(input_ids=ids[:, :1], past_key_values=cache)
            found.append(cache.memory().measured_bytes)
    return round(found[0] / found[1], 3)


def main() -> None:
    """Measures and prints; with --write saves the run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--eager", nargs="+", choices=EAGER, help="only these methods' steps without graphs; not with --write"
    )
    asked = parser.parse_args()
    if asked.write and asked.eager:  # the record names the versions and threads of one run
        parser.error(f"--write replaces the whole record; leave out --eager {' '.join(asked.eager)}")
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        parser.error("Triton must interpret its kernels here; set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    step_graphs.recorder = lambda device: Nothing
    batches = {"equal": [PROMPT] * ROWS, "ragged": [PROMPT - row for row in range(ROWS)]}
    model, found = model_of(), dict[str, dict[str, list[float]]]()
    os.environ["CALIB_KERNELS"] = "reference"
    for method in METHODS if asked.eager is None else ():
        found[method] = {
            name: min((microseconds(model, method, lengths) for _ in range(RUNS)), key=lambda run: run[1])
            for name, lengths in batches.items()
        }
        print(f"{method:10}", *(f"{name} {own[1]:4.0f} us" for name, own in found[method].items()), sep="  ")
    small, wide, shares, bytes_of = model_of(2), model_of(2, 128).bfloat16(), dict[str, dict[str, float]](), {}
    for method, options in {**METHODS, "klt": EAGER["klt"]}.items() if asked.eager is None else ():
        shares[method] = {name: replayed(small, method, options, lengths) for name, lengths in batches.items()}
        bytes_of[method] = room(wide, method, options)
        told = (f"{name} {100 * own:.1f} % replayed" for name, own in shares[method].items())
        print(f"{method:10}", *told, f"{bytes_of[method]:.3f} of the bytes", sep="  ")
    os.environ["CALIB_KERNELS"] = "triton"
    model, eager = eager_host.model_of(LAYERS), dict[str, dict[str, dict[str, Any]]]()
    for method in asked.eager or EAGER:
        options = EAGER[method]
        eager[method] = {
            name: min(
                (eager_host.step(model, method, options, lengths) for _ in range(RUNS)),
                key=lambda run: run["microseconds"],
            )
            for name, lengths in batches.items()
        }
        print(
            f"{method:10}", *(
                f"{name} {own['microseconds'] / 1e3:5.2f}, mean {own['mean_microseconds'] / 1e3:5.2f} ms"
                for name, own in eager[method].items()
            ),
            eager[method]["equal"]["launches"], sep="  ",
        )  # fmt: skip
    if asked.write:
        content = {"layers": LAYERS, "rows": ROWS, "prompt": PROMPT, "microseconds": found}
        content |= {"replayed": shares, "bytes_with_graphs": bytes_of, "eager": eager}
        keep("replay_host.json", content)


if __name__ == "__main__":
    main()
