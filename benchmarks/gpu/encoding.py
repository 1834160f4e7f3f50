"""Times quantising and packing of a prompt's keys and values against `clone()`, one pass that reads and writes them.

"one pass": ranges are those of the group that is being encoded (KIVI: keys by channel in groups of 32 tokens, values by token in
groups of 32 channels, 4 bits). "two passes": ranges over the whole prompt are measured first (ZipCache: keys by channel, values by
token after division by the channel's scale).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.agreement import equal, kernels
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.decode_attention import shape_a
from benchmarks.gpu.launches import supported
from benchmarks.gpu.layers import prompt_of
from benchmarks.gpu.turns import in_turns
from calib.kernels.channel_ranges.operation import measured
from calib.kernels.quantise.operation import encode_fixed, encode_uniform
from calib.kernels.quantise.prologue import Prologue

BITS, GROUP = 4, 32

Pair = tuple[Tensor, Tensor]


@torch.no_grad()
def one_pass(keys: Tensor, values: Tensor) -> list[Tensor]:
    """Returns words and parameters of keys and values."""
    first = encode_uniform(keys, (GROUP, 1), BITS, 1.0, torch.float16)
    return [*first, *encode_uniform(values, (1, GROUP), BITS, 1.0, torch.float16)]


@torch.no_grad()
def two_passes(keys: Tensor, values: Tensor) -> list[Tensor]:
    """Returns words of keys and values and the values' parameters, after measuring channel ranges and scales."""
    center, half = measured("range", keys, torch.float16)
    (scale,) = measured("root", values, torch.float16)
    first = encode_fixed(keys, BITS, 1.0, Prologue(center=center, half=half))
    group = (1, values.shape[-1])
    return [first, *encode_uniform(values, group, BITS, 1.0, torch.float16, prologue=Prologue(half=scale))]


def quantise(bench: Bench) -> Measured:
    """Returns the figures "one pass" and "two passes": time over that of `clone()`."""
    bench.needs_kernel("quantise")
    sets = [prompt_of(bench, shape_a(bench), seed) for seed in range(bench.sizes.host_sets)]
    launched = {name: checked(bench, way, sets[0]) for name, way in WAYS.items()}
    calls: dict[str, Callable[[], object]] = {name: partial(each, way, sets) for name, way in WAYS.items()}
    calls |= {"clone": partial(each, cloned, sets), "clone again": partial(each, cloned, sets)}
    found = in_turns(bench, calls, {name: (name, "clone") for name in WAYS} | {"A/A": ("clone again", "clone")})
    figures = {name: found["ratios"][name] for name in WAYS}
    return Measured(figures, {"bits": BITS, "group": GROUP, "kernels_launched": launched, **found})


WAYS = {"one pass": one_pass, "two passes": two_passes}


def cloned(keys: Tensor, values: Tensor) -> Pair:
    """Returns copies of keys and values: the baseline."""
    return keys.clone(), values.clone()


def each(way: Callable[[Tensor, Tensor], object], sets: list[Pair]) -> None:
    """Runs `way` on all sets of inputs, each many times larger than the L2."""
    for keys, values in sets:
        way(keys, values)


def checked(bench: Bench, way: Callable[[Tensor, Tensor], list[Tensor]], given: Pair) -> list[str]:
    """Compares the first row bit for bit with plain torch on the CPU, the reference; returns the names of launched kernels."""
    with supported(bench, "quantise") as launched:
        found = way(*given)
    with kernels("reference"):
        expected = way(*(part[:1].cpu() for part in given))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        equal(f"part {number} of the first row", ours[:1].cpu(), theirs)
    return sorted(launched)
