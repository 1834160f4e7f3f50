"""Shared parts of the benchmarks: models by name, interleaved timing, quartiles, and the header of a run's file."""

import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> PreTrainedModel:
    """Returns the model in a folder, or `wide`: random weights with the KV shape of an 8B model, 2 layers; float32."""
    if name != "wide":
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=65536)).eval()


def quartiles(values: list[float]) -> list[float]:
    """Returns lower quartile, median and upper quartile."""
    return [round(value, 3) for value in statistics.quantiles(values, n=4)]


Steps = Mapping[str, Callable[[], object]]

PAUSE = 0.1  # seconds before a step: idle threads of numpy and torch spin for a while and slow each other down


def turn_by_turn(
    steps: Callable[[int], Steps],
    turns: int,
    ratios: Mapping[str, tuple[str, str]],
    warm: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, list[float]]]:
    """Times every step of `steps(turn)` in every turn, in another order each turn.

    Returns quartiles of the milliseconds of every step, and of `ratios` (numerator, denominator) within turns. All steps run in one
    process, so that other load slows both sides of a ratio. The first `warm` turns are not kept. `clock`: `time.process_time`
    counts processor time, for a machine that runs other programs too.
    """
    shuffled, seconds = random.Random(0), dict[str, list[float]]()
    for turn in range(turns + warm):
        timed = steps(turn)
        for name in shuffled.sample(list(timed), len(timed)):
            time.sleep(PAUSE)
            torch.ones(2**17).add_(1)  # wakes torch's threads, which sleep by now; waking takes as long as a small step
            start = clock()
            timed[name]()
            seconds.setdefault(name, []).append(clock() - start)
    kept = {name: values[warm:] for name, values in seconds.items()}
    found = {
        name: quartiles([above / below for above, below in zip(kept[one], kept[other], strict=True)])
        for name, (one, other) in ratios.items()
    }
    return {"milliseconds": {name: quartiles([1e3 * s for s in v]) for name, v in kept.items()}, "ratios": found}


def show(run: Mapping[str, object], title: str = "") -> None:
    """Prints the ratios and the median milliseconds of a run."""
    for name, (low, median, high) in run["ratios"].items():  # type: ignore[attr-defined]
        print(f"{title}{name:<52} {median:7.2f}  ({low:.2f} ... {high:.2f})")
    print({name: times[1] for name, times in run["milliseconds"].items()})  # type: ignore[attr-defined]


def keep(name: str, content: dict[str, object]) -> None:
    """Writes a run to `results/NAME`, with the versions, the threads and the processor's vector instructions."""
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    RESULTS.mkdir(exist_ok=True)
    run = {"threads": torch.get_num_threads(), "versions": versions, **content}
    (RESULTS / name).write_text(json.dumps(run, indent=1) + "\n")
