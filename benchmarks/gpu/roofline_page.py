"""Writes docs/results/gpu/roofline.md from the numbers of `roofline.py`, with measured figures of runs on GPUs beside them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu import encoding_cost
from benchmarks.gpu.page_tables import between, measured, table
from benchmarks.gpu.prefill_page import section
from benchmarks.gpu.report import RESULTS
from benchmarks.gpu.targets import TARGETS

INTRODUCTION = """# Speed predicted from the compiled kernels

    python -m benchmarks.gpu.roofline --write

All times on this page are **predicted**, except those in the columns *measured*, which are of an H200 and an H100. The script
compiles the loops of the attention kernels that a decode step launches, for sm_80, sm_90 and sm_100, with the compiler of
Triton {triton}. In their disassembly (SASS) it counts instructions, registers, shared memory, loads and barriers. From these
counts and the GPU's data sheet it computes the time that a step takes if nothing else delays it. A real step takes longer: on
the H200 1.4 to 2.0 times as long, on the H100 1.4 times (GEAR aside, which was measured with earlier kernels). A part of the
difference is [the cost of a step that does not depend on its number of
tokens](README.md#what-a-step-costs-however-few-tokens-it-meets). So a target beyond the prediction cannot be reached with these
kernels, and the page shows which limit prevents it; a target that the prediction reaches may still be missed. All numbers are
in `benchmarks/results/gpu_roofline.json`.

Shape A: batch 8, 32 query heads and 8 KV heads of 128 channels, 32,768 tokens. The row "MHA" has one sequence with 32 query
heads and 32 KV heads. The baseline is `scaled_dot_product_attention` (SDPA) over keys and values in bfloat16.
"""

STEPS = """
## Predictions and targets

*attention*: time of the kernels that attend to packed tokens, without the cost of their launches. *step with launches* adds the
cost of all launches of a layer's step as nodes of a CUDA graph, {node} us each. A speedup is SDPA's time over ours; in the rows
"share of the copy rate" the same columns have the rate at which packed bytes are read, over the rate of a copy. *bound by*: the
limit that takes longest, for each launch of attention (explained [below](#attention-kernels-time-by-each-limit)). The targets,
*accept* and *stretch*, were set for an H200.

"""

ROOM = """
## How many launches a target allows

The largest number of launches of a layer's step with which the step can still reach the target, at {node} us each: they have to
fit between the predicted time of attention and SDPA's time divided by the target.

"""

PARTS = """
## Attention kernels: time by each limit

Microseconds of a launch of attention by each limit. The largest one is taken as the launch's time, as if the others overlapped
with it completely. *bytes*: reading codes and parameters, and writing and reading the partial results of the softmax, at the
rate of a copy. *busy*: the time for which the busiest scheduler issues instructions, or for which the pipe in brackets is busy.
*waits*: the time of one iteration of a program that has a multiprocessor to itself (mainly the latency of its loads), times the
iterations of a program, times the rounds in which programs run one after the other.

"""

LOOPS = """
## The loops

An iteration of a loop processes as many tokens as the column *tokens* says. *resident programs*: how many programs fit the
registers and the shared memory of a multiprocessor; a launch starts {programs} on each. *instructions a code*: instructions of
a lane divided by the codes that it processes, padding included. *loads*: load instructions of a warp. *bytes ahead*: bytes that
a program has requested for the next iteration while it computes one. *stalls*: how often a warp that runs alone stops for a
load from memory in an iteration. *clocks alone*: the clocks of its iteration then. The limits of these loops are in
`kernels/attend/specialisations.py`; `tests/kernels/test_ahead_of_time.py` compiles the loops and checks the limits.

The loops with ranges of channels are those of `zipcache`'s prompts and of `gear`, those per channel those of `kivi` ("ahead":
they also return the scores of keys that are packed before their values). The loop with keys per token is `rtn`'s. The last two
are `klt`'s, with several bit widths in a token: "turned" loops apply RoPE to the decoded keys, and the "mixed" one also sums
the key codes from which values are predicted.

"""

LISTS = """
`gear` has two more kernels for its outliers (`kernels/outliers`): *scores*, before attention, for those of keys, and
*mixtures*, after it, for those of values. The outer loop of each goes over tiles of 32 tokens of keys, or over a warp's
stretches of 512 tokens of values. The inner loop goes over the outliers of each lane, {of_scores} of keys or {of_mixtures} of
values in an iteration. With 2 % outliers at random positions the inner loop has {scores:.1f} iterations for a tile of keys, as
its token with the most outliers needs, and {mixtures:.1f} for a stretch.

"""

ASSUMED = """
## What is assumed

| GPU | multiprocessors | clock | peak rate of memory | rate of a copy | source |
|---|---|---|---|---|---|
{devices}

- **Bytes** move at {copy:.0%} of the peak rate, for SDPA as well. The targets assume 4.3 of an H200's 4.8 TB/s; the same share
  is assumed for the other GPUs.
- **A multiprocessor** has 4 schedulers, 65,536 registers of 4 bytes and {shared}.
  It holds at most 64 warps and 32 programs (CUDA programming guide, "Compute Capabilities").
- **A scheduler** issues one instruction of a warp per clock. Operations on integers, logic, shifts, comparisons and selections
  keep their pipe busy for two clocks, and so do float32 operations on an A100; exponentials for eight; loads and stores of
  shared memory and shuffles for four per register ("Throughput of Native Arithmetic Instructions" in the same guide). A matrix
  instruction of 16 x 8 x 16 takes eight clocks on an A100 and four on an H100, by the dense float16 rate of the data sheet.
- **A load** from memory arrives after {memory} clocks, one from shared memory after {near} (arXiv:2402.13499, measured one at a
  time; with more loads in flight they take longer).
- **A launch** is a node of a CUDA graph and costs {node} us. The numbers of launches are those of
  `python -m benchmarks.gpu.launches`. SDPA is assumed to take {baseline} launches.

## What is left out

- Attention over the exact window and the new token, the merge of the partial results, and torch's own kernels: of these only
  the cost of the launches is counted; their bytes are a few percent.
- What slows one limit down when another is reached at the same time, latencies of arithmetic, barriers between several warps,
  bank conflicts, the lower memory rate of short reads, and clocks below the boost clock: all of these make a step slower.
- SDPA is assumed to be limited by its bytes alone. Where torch's backend is slower, the speedups are higher.
- The kernels are compiled and counted for sm_100 as well, but no time is predicted for it.
"""

Run = Mapping[str, Any]


def runs() -> list[Run]:
    """Returns the runs measured on GPUs, the newest last."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob("gpu-*.json")]
    return sorted(found, key=lambda run: run["when"])


def step_rows(run: Run, of: Sequence[Run]) -> Iterator[list[object]]:
    """Yields a row for each step and GPU, and one for its share of the copy rate if that is a target."""
    targets = {target.name: target for target in TARGETS}
    for step in run["steps"]:
        bound = ", ".join(part["bound"] for part in step["parts"])
        target = targets.get(step["case"])
        limits = [target.shown(target.accept), target.shown(target.stretch)] if target else ["", ""]
        times = [f"{1e6 * step['attention']:.0f} us", f"{1e6 * step['step'][0]:.0f} ... {1e6 * step['step'][1]:.0f} us"]
        ratios = [f"{step['speedup_of_attention']:.2f}x", between(*step["speedup"], unit="x")]
        found = measured(step["case"], step["device"], of) if target else ""
        yield [step["case"], step["device"], *times, *ratios, *limits, found, bound]
        if step["copy_row"]:
            target = targets[step["copy_row"]]
            ratios = [f"{step['share_of_copy_of_attention']:.0%}", between(*step["share_of_copy"], unit="%")]
            limits = [target.shown(target.accept), target.shown(target.stretch)]
            found = measured(target.name, step["device"], of)
            yield [target.name, step["device"], "", "", *ratios, *limits, found, ""]


def room(run: Run) -> Iterator[list[object]]:
    """Yields how many launches each step may have to meet its targets, at the higher cost of a graph node."""
    node = run["node_seconds"][1]
    for target in TARGETS:
        for step in run["steps"]:
            if step["case"] == target.name:
                left = [step["sdpa"][1] / limit - step["attention"] for limit in (target.accept, target.stretch)]
                counts = [str(int(seconds / node)) if seconds > 0 else "none" for seconds in left]
                yield [step["case"], step["device"], f"`{step['method']}`", step["launches"], *counts]


def part_rows(run: Run) -> Iterator[list[object]]:
    """Yields a row for each launch of attention."""
    for step in run["steps"]:
        for part in step["parts"]:
            taken = part["seconds"]
            pipe = next(name for name in taken if name not in ("bytes", "waits"))
            grid = [part["splits"], part["turns"], part["programs"]]
            times = [f"{1e6 * taken['bytes']:.0f}", f"{1e6 * taken[pipe]:.0f} ({pipe})", f"{1e6 * taken['waits']:.0f}"]
            yield [step["case"], step["device"], part["loop"], f"{part['packed'] / 1e6:.0f} MB", *grid, *times]


def loop_rows(run: Run) -> Iterator[list[object]]:
    """Yields a row for each loop and compute capability."""
    for loop in run["loops"]:
        pipe, clocks = max(loop["busy"].items(), key=lambda item: item[1], default=("", ""))
        memory = [loop["registers"], loop["spilled"], loop["shared"], loop["programs"], loop["tokens"]]
        turn = [loop["instructions"], f"{loop['instructions_of_code']:.2f}", f"{clocks} ({pipe})" if pipe else ""]
        waits = [loop["loads"], loop["bytes_ahead"], loop["barriers"], loop["waits"], loop["alone"]]
        yield [loop["name"], f"sm_{loop['capability']}", *memory, *turn, *waits]


def list_rows(run: Run) -> Iterator[list[object]]:
    """Yields a row for each kernel of outlier lists and compute capability."""
    for loop in run["lists"]:
        counts = [loop[part][number] for number in ("instructions", "alone") for part in ("around", "inside")]
        yield [loop["name"], f"sm_{loop['capability']}", loop["registers"], loop["programs"], *counts]


def page(run: Run, of: Sequence[Run]) -> str:
    """Returns the whole page; `of` are measured runs."""
    from benchmarks.gpu.devices import BASELINE_NODES
    from benchmarks.gpu.roofline_lists import AT_ONCE, MIXTURES, SCORES, turns_of_stretch, turns_of_tile
    from calib.kernels.attend.options import PROGRAMS
    from calib.kernels.occupancy import SHARED
    from calib.kernels.turn_alone import MEMORY
    from calib.kernels.turn_alone import SHARED as NEAR

    node = " ... ".join(f"{1e6 * seconds:g}" for seconds in run["node_seconds"])
    steps = [
        "step",
        "GPU",
        "attention",
        "step with launches",
        "speedup of attention",
        "speedup of the step",
        "accept",
        "stretch",
    ]
    parts = [
        "step",
        "GPU",
        "loop",
        "read",
        "programs for a KV head",
        "iterations of each",
        "programs on a multiprocessor",
        "bytes, us",
        "busy, us",
    ]
    loops = [
        "loop",
        "compiled for",
        "registers",
        "spilled bytes",
        "shared bytes",
        "resident programs",
        "tokens",
        "instructions",
        "instructions a code",
        "busy clocks",
        "loads",
        "bytes ahead",
        "barriers",
        "stalls",
        "clocks alone",
    ]
    devices = "\n".join(
        f"| {own['name']} | {own['multiprocessors']} | {own['hertz'] / 1e9:.2f} GHz | {own['bytes_per_second'] / 1e9:,.0f} GB/s "
        f"| {run['copy'] * own['bytes_per_second'] / 1e9:,.0f} GB/s | {own['source']} |"
        for own in run["devices"]
    )
    shared = f"{SHARED[80] >> 10} KiB of shared memory on an A100 and {SHARED[90] >> 10} on an H100"
    text = INTRODUCTION.format(triton=run["triton"]) + STEPS.format(node=node)
    text += table([*steps, "measured", "bound by"], step_rows(run, of))
    text += ROOM.format(node=f"{1e6 * run['node_seconds'][1]:g}")
    text += table(["step", "GPU", "method", "launches now", "at most for accept", "at most for stretch"], room(run))
    text += section(run["prefill"], of, run["node_seconds"])
    text += encoding_cost.section(run, of)
    text += PARTS + table([*parts, "waits, us"], part_rows(run))
    text += LOOPS.format(programs=PROGRAMS)
    text += table(loops, loop_rows(run))
    share = run["outliers"]
    turns = {"scores": turns_of_tile(share), "mixtures": turns_of_stretch(share)}
    text += LISTS.format(**turns, of_scores=AT_ONCE[SCORES], of_mixtures=AT_ONCE[MIXTURES])
    lists = [
        "kernel",
        "compiled for",
        "registers",
        "resident programs",
        "instructions, outer loop",
        "instructions, inner loop",
        "clocks alone, outer loop",
        "clocks alone, inner loop",
    ]
    text += table(lists, list_rows(run))
    return text + ASSUMED.format(
        devices=devices, copy=run["copy"], shared=shared, memory=MEMORY, near=NEAR, node=node, baseline=BASELINE_NODES
    )
