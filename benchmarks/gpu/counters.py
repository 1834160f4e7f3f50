"""Runs one decode step of some methods inside a profiled range, and reads Nsight Compute's counters of its kernels.

    ncu --clock-control none --profile-from-start off --set full -o "$OUT/counters" python -m benchmarks.gpu.counters zipcache gear
    ncu --import "$OUT/counters.ncu-rep" --page details > "$OUT/counters.txt"
    python -m benchmarks.gpu.counters --read "$OUT/counters.txt"     # the figures below, as JSON

Shape A, one layer. The first step of each compiles its kernels; the second is counted.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decode_attention import TIERS, each, shape_a
from benchmarks.gpu.layers import Step, bare_layers, filled, prompt_of
from benchmarks.gpu.sizes import REAL, Sizes

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "zipcache": ("zipcache", TIERS),
    "kivi, 4 bits": ("kivi", {"bits": 4, "group": 128, "residual": 128}),
    "kivi, 2 bits": ("kivi", {"bits": 2, "group": 128, "residual": 128}),
    "gear": ("gear", {}),
    "klt": ("klt", {"bits": 2.0, "block": 128}),
    "mikv": ("mikv", {}),
}

# Figures of a kernel, by Nsight Compute's names for them.
FIGURES = {
    "microseconds": "Duration",
    "registers": "Registers Per Thread",
    "share of DRAM": "DRAM Throughput",
    "share of L2": "L2 Cache Throughput",
    "instructions": "Executed Instructions",
    "instructions a clock": "Executed Ipc Active",
    "warps of a scheduler": "Active Warps Per Scheduler",
    "clocks between a warp's instructions": "Warp Cycles Per Issued Instruction",
    "spilled requests": "Local Memory Spilling Requests",
}
KERNEL = re.compile(r"^  (\w+) \((\d+), (\d+), (\d+)\)x\((\d+), \d+, \d+\)", re.M)


def kernels(text: str) -> list[dict[str, Any]]:
    """Returns every kernel of a details page, in launch order, with `FIGURES`; shares are fractions of 1."""
    starts = [*KERNEL.finditer(text)]
    ends = [found.start() for found in starts[1:]] + [len(text)]
    return [_figures(found, text[found.end() : end]) for found, end in zip(starts, ends, strict=True)]


def _figures(kernel: re.Match[str], text: str) -> dict[str, Any]:
    name, *grid, threads = kernel.groups()
    found: dict[str, Any] = {"kernel": name, "grid": [int(count) for count in grid], "threads": int(threads)}
    for own, theirs in FIGURES.items():
        line = re.search(rf"^ *{re.escape(theirs)} .*?([\d.,]+)$", text, re.M)
        if line is not None:
            value = float(line.group(1).replace(",", ""))
            found[own] = round(value / 100, 4) if own.startswith("share") else value
    return found


@torch.no_grad()
def step(name: str, device: torch.device, sizes: Sizes = REAL) -> None:
    """Runs a decode step of a method twice, the second time profiled."""
    bench = Bench(device, sizes, time.monotonic() + 600)
    (method, options), heads = STEPS[name], shape_a(bench)
    layers, (keys, values) = bare_layers(method, heads, 1, **options), prompt_of(bench, heads, 0)
    filled(layers[0], heads, keys, values, 0)
    given = [Step.drawn(bench, heads, keys, 100)]
    each(layers, given)
    _profiled(bench, True)
    each(layers, given)
    _profiled(bench, False)


def _profiled(bench: Bench, on: bool) -> None:
    if bench.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start() if on else torch.cuda.profiler.stop()


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("steps", nargs="*", metavar="STEP", help=f"of {'; '.join(STEPS)} (all)")
    found.add_argument("--read", type=Path, metavar="FILE", help="print the figures of a details page, and run nothing")
    return found


def main(arguments: list[str] | None = None) -> str | None:
    """Runs the command; returns an error message for wrong arguments or without a GPU, else None."""
    asked = parser().parse_args(arguments)
    if asked.read is not None:
        if not asked.read.is_file():
            return f"--read takes a details page of Nsight Compute; there is no {str(asked.read)!r}"
        print(json.dumps(kernels(asked.read.read_text(encoding="utf-8")), indent=1))
        return None
    if unknown := [name for name in asked.steps if name not in STEPS]:
        return f"no step is counted of {', '.join(unknown)}; name some of {'; '.join(STEPS)}"
    if not torch.cuda.is_available():
        return "counters are a GPU's, and torch can use none here"
    for name in asked.steps or STEPS:
        step(name, torch.device("cuda", 0))
        print(name, flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
