"""Times attention with other launch options than its default: programs per multiprocessor, and pipeline stages of loads. It times
the kernel alone and a layer's step, the latter also without overlapping launches.

These options can only be decided by measuring: more programs hide more memory latency, but leave more parts to merge; more stages
need more shared memory, which leaves room for fewer programs; a launch that begins early takes resources from the one before.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from benchmarks.gpu.agreement import agree
from benchmarks.gpu.attend_alone import KERNEL, every, expected, grouped, table_of, tier
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.decode_attention import TIERS, each, fitting, shape_a
from benchmarks.gpu.graphs import one_line, replayed
from benchmarks.gpu.layers import Step, bare_layers, filled, prompt_of
from benchmarks.gpu.turns import in_turns_or_none
from calib.kernels.attend import exact_triton, page_launch

PROGRAMS, STAGES = (4, 8, 12, 16), (2, 3, 5)
WARPS = (1, 2, 4, 8)  # of the launch that merges the parts of the softmax
LAYERS = 3  # layers of a cache, whose steps are timed together
OWN = "as they are"


def batch_1(bench: Bench) -> Measured:
    """Measures one row."""
    return swept(bench, 1)


def batch_8(bench: Bench) -> Measured:
    """Measures shape A."""
    return swept(bench, bench.sizes.batch)


@contextmanager
def options(programs: int, stages: int) -> Iterator[None]:
    """Context in which launches have these options."""
    held = page_launch.PROGRAMS, page_launch.stages_of, page_launch.PageLaunch.over
    page_launch.PROGRAMS, page_launch.stages_of = programs, lambda *given: stages
    page_launch.PageLaunch.over = staticmethod(page_launch.made)  # a stream's cached launch would keep its own options
    try:
        yield
    finally:
        page_launch.PROGRAMS, page_launch.stages_of, over = held
        page_launch.PageLaunch.over = staticmethod(over)


@contextmanager
def joining(warps: int) -> Iterator[None]:
    """Context in which the launches that merge parts have so many warps."""
    held = exact_triton.exact_launch
    exact_triton.exact_launch = lambda *given: held(*given) | {"num_warps": warps}
    try:
        yield
    finally:
        exact_triton.exact_launch = held


@contextmanager
def one_by_one() -> Iterator[None]:
    """Context in which a launch begins only when the one before is done."""
    held = exact_triton.begins_early
    exact_triton.begins_early = lambda device: False
    try:
        yield
    finally:
        exact_triton.begins_early = held


@torch.no_grad()
def swept(bench: Bench, rows: int) -> Measured:
    """Returns figures such as "4 bit, 8 programs, 3 stages": the time with the kernel's default options over that with these."""
    bench.needs_kernel("attend", "quantise")
    heads = replace(shape_a(bench), rows=rows)
    exact = [prompt_of(bench, heads, seed) for seed in range(bench.sizes.sets)]
    steps = [Step.drawn(bench, heads, keys, 100 + seed) for seed, (keys, _) in enumerate(exact)]
    asked, span = [grouped(step.query, heads.kv_heads) for step in steps], table_of(bench, rows)
    figures: dict[str, list[float]] = {}
    details: dict[str, object] = {"rows": rows, "tokens": bench.sizes.tokens}
    for bits in (4, 2):
        tiers = [tier(bits, fitting(bench)["group"], *given) for given in exact]
        right, refused = expected(asked[-1], *tiers[-1], span.table), dict[str, str]()
        call = partial(every, bench, asked, tiers, span)
        calls: dict[str, Callable[[], object]] = {}
        ways: dict[str, str] = {}
        calls[OWN], ways[OWN] = replayed(bench, call, None)
        for programs, stages in product(PROGRAMS, STAGES):
            name = f"{programs} programs, {stages} stages"
            with options(programs, stages):
                try:
                    agree(f"attention at {bits} bits with {name}", call(), right, KERNEL)
                except Exception as error:  # for instance Triton's OutOfResources: too little shared memory
                    refused[name] = one_line(error)
                    continue
                calls[name], ways[name] = replayed(bench, call, None)
        pairs = {name: (OWN, name) for name in (*calls, "again")}
        found = in_turns_or_none(bench, {**calls, "again": calls[OWN]}, pairs, figures)
        if found is None:
            break
        figures |= {f"{bits} bit, {name}": found["ratios"][name] for name in calls if name != OWN}
        medians = {name: found["milliseconds"][name][1] for name in calls}
        details[f"{bits} bit"] = {
            "best": min(medians, key=medians.__getitem__),
            "A/A": found["ratios"]["again"],
            "refused": refused,
            "timed": ways,
            **found,
        }
    return Measured(figures, details)


@torch.no_grad()
def of_steps(bench: Bench) -> Measured:
    """Returns figures such as "zipcache, 8 programs, 3 stages": a layer's step time with default options over that with these."""
    bench.needs_kernel("attend", "quantise")
    heads, known = shape_a(bench), {"zipcache": TIERS}
    known |= {f"kivi, {bits} bits": {"bits": bits, "residual": 128, **fitting(bench)} for bits in (4, 2)}
    (keys, values), figures, details = prompt_of(bench, heads, 0), dict[str, list[float]](), dict[str, object]()
    step = Step.drawn(bench, heads, keys, 100)
    for name, given in known.items():
        layers = bare_layers(name.split(",")[0], heads, LAYERS, **given)
        for layer in layers:
            filled(layer, heads, keys, values, 0)
        calls = {OWN: replayed(bench, partial(each, layers, [step] * LAYERS), layers)[0]}
        refused = dict[str, str]()
        others = {f"{p} programs, {s} stages": options(p, s) for p, s in product((8, 10, 12), STAGES)}
        others |= {f"{warps} warps join": joining(warps) for warps in WARPS} | {"no launch early": one_by_one()}
        for other, launches in others.items():
            trial = copy.deepcopy(layers)  # without recorded launches, which would keep their options
            call = partial(each, trial, [step] * LAYERS)
            with launches:
                try:
                    call()
                except Exception as error:
                    refused[other] = one_line(error)
                    continue
                calls[other] = replayed(bench, call, trial)[0]
        found = in_turns_or_none(bench, calls, {other: (OWN, other) for other in calls}, figures)
        if found is None:
            break
        figures |= {f"{name}, {other}": found["ratios"][other] for other in calls if other != OWN}
        details[name] = {other: found["milliseconds"][other][1] / LAYERS for other in calls} | {"refused": refused}
    return Measured(figures, details)
