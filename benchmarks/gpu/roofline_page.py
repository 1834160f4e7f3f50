"""Writes docs/results/gpu/roofline.md from the numbers of `roofline.py`, with measured figures of runs on GPUs beside them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.page_tables import between, measured, table
from benchmarks.gpu.prefill_page import section
from benchmarks.gpu.report import RESULTS
from benchmarks.gpu.targets import TARGETS

INTRODUCTION = """# What the compiled loops allow

    python -m benchmarks.gpu.roofline --write

**Predicted**, and in the columns *measured* what an H200 and an H100 took. The script compiles the loops of attention over packed
tokens that a decode step launches, for sm_80, sm_90 and sm_100, with Triton {triton}'s own compiler. It reads them in
the disassembler (SASS): instructions, registers, shared memory, loads, barriers. From these and the GPU's data sheet it
derives the time that a step takes if nothing else delays it. A real step takes longer: on the H200 1.4 to 2.0 times as
long, on the H100 1.4 times, and [what a step costs however few tokens it
meets](README.md#what-a-step-costs-however-few-tokens-it-meets) explains a part of it. So the page says which targets
are out of reach already, and why; that a target is within a prediction does not say that it is reached.
Numbers: `benchmarks/results/gpu_roofline.json`.

Shape A: batch 8, 32 query heads and 8 KV heads of 128 channels, 32,768 tokens. The row "MHA" has one sequence of 32
query and 32 KV heads. The baseline is `scaled_dot_product_attention` (SDPA) over keys and values in bfloat16.
"""

STEPS = """
## Predictions beside targets

*attention* is the kernel over packed tokens without any launch's cost. *step* adds what all launches of a layer cost
as nodes of a CUDA graph, {node} us each. A ratio is SDPA's time over ours. *bound* is what takes the longest in a
launch of attention. The targets were set for an H200.

"""

ROOM = """
## Launches that the targets leave room for

As many as fit between the predicted time of attention and SDPA's time divided by the target, at {node} us each. A
layer's step has to launch no more.

"""

PARTS = """
## Where a prediction comes from

Microseconds of a launch of attention by each limit. The largest counts, as if the others were hidden behind it
wholly. *bytes*: codes and parameters read, parts of the softmax written and read, at the rate of a copy. *busy*: what
the scheduler that has most to do needs, for issuing or in the named pipe. *waits*: what one program needs alone,
times its turns and the rounds in which programs follow each other.

"""

LOOPS = """
## The loops

A *turn* is one passage of the loop, for as many tokens as stand in *tokens*. *at once*: programs that registers and
shared memory let run side by side on a multiprocessor, where a launch starts {programs}. *a code*: instructions of a
lane for one code, padding included. *loads* are instructions of a warp; *ahead* are bytes that a program has under
way from one turn to the next. *waits*: how often a warp alone stops for a load from memory; *alone*: clocks of its
turn then. The limits that hold these loops are in `kernels/attend/specialisations.py`;
`tests/kernels/test_ahead_of_time.py` compiles and compares.

"""

LISTS = """
What `gear` adds before attention and behind it (`kernels/outliers`) has two loops: one over 32 tokens of keys, or a warp's
stretches of 512 tokens of values, and *inside* it one over outliers of each lane, {of_scores} of keys or {of_mixtures}
of values at a time. With 2 % outliers at random the inner one turns {scores:.1f} times for a tile of keys, as its fullest
token asks, and {mixtures:.1f} times for a stretch.

"""

ASSUMED = """
## What is assumed

| GPU | multiprocessors | clock | memory, peak | a copy | from |
|---|---|---|---|---|---|
{devices}

- **Bytes** move at {copy:.0%} of the peak, for SDPA as well. The targets count on 4.3 of an H200's 4.8 TB/s; the same
  share is assumed of the others.
- **A multiprocessor** has 4 schedulers, 65,536 registers of 4 bytes, {shared}, 64 warps and 32 programs at most (CUDA
  programming guide, "Compute Capabilities").
- **A scheduler** issues one instruction of a warp a clock. Whole numbers, logic, shifts, comparisons and selections
  take two clocks, and so do float32 operations on an A100; exponentials eight; loads and stores of shared memory and
  shuffles four for each register ("Throughput of Native Arithmetic Instructions" in the same guide). A matrix
  instruction of 16 x 8 x 16 takes eight on an A100 and four on an H100, from the dense float16 rate of the data
  sheet.
- **A load** from memory comes after {memory} clocks, one from shared memory after {near} (arXiv:2402.13499, measured
  one at a time; under load they take longer).
- **A launch** is a node of a CUDA graph, {node} us. Counts are those of `python -m benchmarks.gpu.launches`. SDPA is
  taken to have {baseline}.

## What is left out

- The exact window and the new token, the merge of parts and torch's own kernels count as launches alone; their bytes
  are a few percent.
- What limits do to each other, what arithmetic takes beyond its issue, barriers of several warps, bank conflicts, the
  memory's loss on short runs, clocks below the boost: all make a step slower.
- SDPA is taken at its best, bound by its bytes. Where torch's backend is slower, ratios are higher.
- sm_100 is compiled and counted. No time is predicted for it.
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
        "step, launches included",
        "attention : SDPA",
        "step : SDPA",
        "accept",
        "stretch",
    ]
    parts = [
        "step",
        "GPU",
        "loop",
        "read",
        "programs of a head",
        "turns of each",
        "on a multiprocessor",
        "bytes",
        "busy",
    ]
    loops = ["loop", "for", "registers", "spilled bytes", "shared bytes", "at once", "tokens", "instructions", "a code"]
    devices = "\n".join(
        f"| {own['name']} | {own['multiprocessors']} | {own['hertz'] / 1e9:.2f} GHz | {own['bytes_per_second'] / 1e9:,.0f} GB/s "
        f"| {run['copy'] * own['bytes_per_second'] / 1e9:,.0f} GB/s | {own['source']} |"
        for own in run["devices"]
    )
    shared = f"{SHARED[80] >> 10} KiB of shared memory on an A100 and {SHARED[90] >> 10} on an H100"
    text = INTRODUCTION.format(triton=run["triton"]) + STEPS.format(node=node)
    text += table([*steps, "measured", "bound"], step_rows(run, of))
    text += ROOM.format(node=f"{1e6 * run['node_seconds'][1]:g}")
    text += table(["step", "GPU", "method", "launches today", "for accept", "for stretch"], room(run))
    text += section(run["prefill"], of, run["node_seconds"])
    text += PARTS + table([*parts, "waits"], part_rows(run))
    text += LOOPS.format(programs=PROGRAMS)
    text += table([*loops, "busy", "loads", "bytes ahead", "barriers", "waits", "alone"], loop_rows(run))
    share = run["outliers"]
    turns = {"scores": turns_of_tile(share), "mixtures": turns_of_stretch(share)}
    text += LISTS.format(**turns, of_scores=AT_ONCE[SCORES], of_mixtures=AT_ONCE[MIXTURES])
    lists = ["kernel", "for", "registers", "at once", "instructions", "inside", "alone", "inside"]
    text += table(lists, list_rows(run))
    return text + ASSUMED.format(
        devices=devices, copy=run["copy"], shared=shared, memory=MEMORY, near=NEAR, node=node, baseline=BASELINE_NODES
    )
